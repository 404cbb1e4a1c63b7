"""nn.DataParallel: one process, a thread per GPU, the model copied to all of them at every step.

    make run RECIPE=dataparallel
    .venv/bin/python -m recipes.dataparallel.train --epochs 30

Success: the last line is `result recipe=dataparallel world_size=1 test_accuracy=0.98.. samples_per_s=...`.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel

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
    return parse(build_parser("dataparallel", __doc__), argv)


def choose_devices(args: Options) -> list[torch.device]:
    """Return all visible GPUs, or the CPU where there is none."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU is visible; use --device cpu")
    if args.device == "cpu" or not torch.cuda.is_available():
        return [torch.device("cpu")]
    # DataParallel: one process drives every GPU that it sees; CUDA_VISIBLE_DEVICES chooses them.
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


class Autocast(nn.Module):
    """The model with its mixed-precision context inside."""

    def __init__(self, model: nn.Module, args: Options, device: torch.device) -> None:
        super().__init__()
        self.model, self.args, self.device = model, args, device

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, S, S) to logits (B, classes)."""
        # DataParallel: each replica runs in a thread of its own, and a thread knows nothing of --amp: DataParallel
        # passes on that autocast is on, but not that it means bf16.
        with autocast(self.args, self.device):
            return self.model(images)


def wrap(model: nn.Module, args: Options, devices: list[torch.device]) -> nn.Module:
    """Return the model as one that spreads each batch over the devices."""
    if len(devices) == 1:
        # DataParallel: with one device there is nothing to split or to copy.
        print(f"DataParallel has one device here ({devices[0]}) and degenerates to RECIPE=single", flush=True)
    elif args.sync_batchnorm:
        raise UserError(
            "--sync-batchnorm: needs a process per GPU, DataParallel is one; drop it or use RECIPE=ddp"
        )
    elif args.compile:
        raise UserError("--compile: replicas would all run the code of the first; drop it or use RECIPE=ddp")
    if args.compile:
        model.compile(mode=args.compile_mode)
    inner = Autocast(model, args, devices[0])
    if devices[0].type == "cpu":
        return inner  # DataParallel would take all GPUs, also under --device cpu
    # DataParallel: every forward pass sends the model's parameters and buffers to each other GPU, and 1/N of the
    # batch; the logits come back. Every backward pass sends each GPU's gradients to the first, which adds them up.
    return DataParallel(inner, device_ids=devices)


def seed_devices(args: Options, step: int, devices: list[torch.device]) -> None:
    """Seed what dropout and the like draw in this step, differently on each device."""
    for i in reversed(range(len(devices))):  # the first comes last: its seed is the CPU's too, as in single
        seed_step(args.seed, step, i, devices[i])


def train_one_epoch(job: Job, parallel: nn.Module, devices: list[torch.device]) -> int:
    """Train to the epoch's end, or until a signal or an error ends it; return GO, STOP or FAIL."""
    args, position, accumulate = job.args, job.position, job.args.accumulate_steps
    decision = GO
    parallel.train()
    job.begin_epoch()
    for images, labels in job.data.train.batches(job.global_batches(), position.epoch):
        seed_devices(args, position.step, devices)
        loss_sum = torch.zeros((), device=job.device)
        parts = zip(images.tensor_split(accumulate), labels.tensor_split(accumulate), strict=True)
        for some_images, some_labels in parts:
            # DataParallel: the logits of all GPUs come back to the first, so that this is the global batch's loss,
            # computed there. Nothing has to be averaged afterwards.
            with autocast(args, job.device):
                loss = cross_entropy(parallel(some_images), some_labels, reduction="sum")
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
def evaluate(job: Job, parallel: nn.Module) -> dict[str, float]:
    """Return test_loss and test_accuracy over the whole test set, each sample counted once."""
    parallel.eval()
    totals = new_totals(job.device)
    everything = torch.arange(len(job.data.test))
    for images, labels in job.data.test.batches(everything.split(EVAL_BATCH_SIZE), job.position.epoch):
        with autocast(job.args, job.device):
            logits = parallel(images)
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
    devices = choose_devices(args)
    device = devices[0]
    data = load_data(args, device, on_bad_image=stop.fail)
    check_batch(args, 1, len(data.train))
    model = build_model(args, data).to(device)
    parallel = wrap(model, args, devices)
    optimizer = build_optimizer(args, model.parameters())
    # DataParallel: the job, and with it the checkpoint, holds the plain model: any recipe can go on from it.
    job = Job(args, data, device, model, optimizer, build_scaler(args, device), stop)
    job.record, content = open_run(args, "dataparallel", [place_of(device)])
    job.restore(content)
    job.begin_record()
    del content  # a copy of the weights

    while not job.is_complete:
        decision = train_one_epoch(job, parallel, devices)
        if decision == STOP:
            job.save()
        raise_error(stop)
        if decision == STOP:
            job.leave()
            return
        is_best = job.end_epoch(evaluate(job, parallel))
        job.save(is_best)
        raise_error(stop)
    job.finish(world_size=1)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
