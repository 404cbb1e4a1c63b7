"""One process, one device: the baseline whose loss curve every other recipe repeats.

    make run RECIPE=single
    .venv/bin/python -m recipes.single.train --epochs 30

Success: the last line is `result recipe=single world_size=1 test_accuracy=0.98.. samples_per_s=...`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from recipes.common.data import EVAL_BATCH_SIZE, load_data
from recipes.common.entry import exit_status
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.metrics import add_batch, averages, new_totals
from recipes.common.models import build_model
from recipes.common.optim import (
    autocast,
    build_optimizer,
    build_scaler,
    learning_rate,
    optimizer_step,
    set_learning_rate,
)
from recipes.common.options import Options, build_parser, check_batch, parse
from recipes.common.places import place_of
from recipes.common.record import open_run
from recipes.common.seeding import choose_kernels, seed_step
from recipes.common.signals import FAIL, GO, STOP, Stop


def options(argv: Sequence[str] | None = None) -> Options:
    """Return the options of this recipe; raises UserError for what cannot work."""
    return parse(build_parser("single", __doc__), argv)


def choose_device(args: Options) -> torch.device:
    """Return the first GPU, or the CPU where there is none."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU is visible; use --device cpu")
    return torch.device("cuda", 0) if args.device != "cpu" and torch.cuda.is_available() else torch.device("cpu")


def train_one_epoch(job: Job) -> int:
    """Train to the epoch's end, or until a signal or an error ends it; return GO, STOP or FAIL."""
    args, position, accumulate = job.args, job.position, job.args.accumulate_steps
    decision = GO
    job.model.train()
    job.begin_epoch()
    for images, labels in job.data.train.batches(job.global_batches(), position.epoch):
        seed_step(args.seed, position.step, 0, job.device)
        loss_sum = torch.zeros((), device=job.device)
        parts = zip(images.tensor_split(accumulate), labels.tensor_split(accumulate), strict=True)
        for some_images, some_labels in parts:
            with autocast(args, job.device):
                loss = cross_entropy(job.model(some_images), some_labels, reduction="sum")
            loss = loss / args.global_batch_size
            job.scaler.scale(loss).backward()
            loss_sum += loss.detach()

        decision = job.stop.vote
        if decision == FAIL:
            break
        rate = learning_rate(args, position.step, job.total_steps)
        set_learning_rate(job.optimizer, rate)
        optimizer_step(args, job.model.parameters(), job.optimizer, job.scaler, job.allows(loss_sum))
        job.count_step()
        if job.is_log_due():
            job.log_step(loss_sum.item(), rate)
        if decision == STOP:
            break
        if job.is_checkpoint_due():
            job.save()
    job.pause()
    return decision


@torch.no_grad()
def evaluate(job: Job) -> dict[str, float]:
    """Return test_loss and test_accuracy over the whole test set, each sample counted once."""
    job.model.eval()
    totals = new_totals(job.device)
    everything = torch.arange(len(job.data.test))
    for images, labels in job.data.test.batches(everything.split(EVAL_BATCH_SIZE), job.position.epoch):
        with autocast(job.args, job.device):
            logits = job.model(images)
        add_batch(totals, logits, labels)
    totals[3] += job.data.train.skipped + job.data.test.skipped
    return averages(totals, len(job.data.test))


def raise_error(stop: Stop) -> None:
    """Raise what a step, an evaluation or a checkpoint has met."""
    if stop.error:
        raise stop.error


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the options say: set everything up, train epoch by epoch, and leave a checkpoint behind."""
    args = options(argv)
    stop = Stop()
    choose_kernels(args)
    device = choose_device(args)
    data = load_data(args, device, on_bad_image=stop.fail)
    check_batch(args, 1, len(data.train))
    model = build_model(args, data).to(device)
    if args.compile:
        model.compile(mode=args.compile_mode)
    optimizer = build_optimizer(args, model.parameters())
    job = Job(args, data, device, model, optimizer, build_scaler(args, device), stop)
    job.record, content = open_run(args, "single", [place_of(device)])
    job.restore(content)
    job.begin_record()
    del content  # a copy of the weights

    while not job.is_complete:
        decision = train_one_epoch(job)
        if decision == STOP:
            job.save()
        raise_error(stop)
        if decision == STOP:
            job.leave()
            return
        is_best = job.end_epoch(evaluate(job))
        job.save(is_best)
        raise_error(stop)
    job.finish(world_size=1)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
