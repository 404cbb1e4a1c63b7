"""Horovod: a process per GPU, gradients averaged by name, in half precision, while backward still runs.

    make run RECIPE=horovod NODES=2
    .venv/bin/horovodrun --gloo -np 2 .venv/bin/python -m recipes.horovod.train --epochs 40
    mpirun -np 2 .venv/bin/python -m recipes.horovod.train --epochs 40

Success: the last line is `result recipe=horovod world_size=2 test_accuracy=0.98.. samples_per_s=...`.
Source: Sergeev and Del Balso 2018, https://arxiv.org/abs/1802.05799.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.common.agreement import begin_run, load_same_data, raise_on_all_ranks, run_on_all_ranks, shard
from recipes.common.data import EVAL_BATCH_SIZE
from recipes.common.devices import agree_on_device, choose_device
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
from recipes.common.options import Options, build_parser, check_batch, one_of, parse
from recipes.common.ranks import Ranks
from recipes.common.seeding import choose_kernels, seed_step
from recipes.common.signals import FAIL, GO, STOP, Stop
from recipes.common.watch import Watch

try:
    import horovod.torch as hvd
except ModuleNotFoundError as error:
    if error.name != "horovod":
        raise
    hvd = None  # not built: main() says how

T = TypeVar("T")


def options(argv: Sequence[str] | None = None) -> Options:
    """Return the options of this recipe; raises UserError for what cannot work."""
    parser = build_parser("horovod", __doc__)
    group = parser.add_argument_group("Horovod")
    group.add_argument(
        "--compression",
        type=one_of("fp16", "none"),
        default="fp16",
        help="how gradients cross the wire: fp16 or none (fp32)",
    )
    return parse(parser, argv)


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device
    watch: Watch

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks; call it on all ranks."""
        # Horovod: gathers the pickled value of each rank.
        return cast(list[T], hvd.allgather_object(value, name="objects"))

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value; call it on all ranks."""
        # Horovod: rank 0 sends its pickled value to all others.
        return cast(T, hvd.broadcast_object(value, root_rank=0, name="object"))

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor on the CPU by rank 0's; call it on all ranks."""
        # Horovod: rank 0 sends the tensor's bytes to all others.
        hvd.broadcast_(tensor, root_rank=0, name="tensor")

    def barrier(self) -> None:
        """Return once every rank has called it."""
        hvd.barrier()


def join_world(args: Options) -> World:
    """Choose this process's device; main() has connected it with the other processes."""
    # Horovod: it tells each process who it is, whatever launched it.
    ranks = Ranks(hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size())
    device = agree_on_device(
        lambda: choose_device(args.device, ranks, has_nccl=hvd.nccl_built()),
        ranks.rank,
        # Horovod: gathers each rank's kind of device and its host.
        lambda kind, text: dict(reversed(hvd.allgather_object((kind, text), name="device"))),
    )
    # Horovod: it has no store for notes that ranks read; what each waits for is known on its own host alone.
    return World(ranks.rank, ranks.world_size, device, Watch(ranks.rank, ranks.world_size, args, None))


def leave_world(world: World) -> None:
    """Disconnect, once no rank waits for another any more."""
    with world.watch("teardown"):
        world.barrier()
    world.watch.close()
    hvd.shutdown()


def wrap(model: nn.Module, args: Options, world: World) -> Any:
    """Return an optimizer that averages the model's gradients over all ranks before it steps."""
    if args.sync_batchnorm:
        raise UserError("--sync-batchnorm is not in this recipe; use RECIPE=ddp for it")
    # Horovod: it takes contiguous tensors only; --channels-last is for images and activations here.
    model.to(memory_format=torch.contiguous_format)
    # Horovod: rank 0's parameters go to all ranks.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if args.compile:
        model.compile(mode=args.compile_mode)
    # Horovod: a hook on each parameter hands its gradient over as soon as backward has it. Gradients that are
    # ready on all ranks are fused into one buffer and averaged (a ring: 2 (N-1)/N of its bytes per rank).
    return hvd.DistributedOptimizer(
        build_optimizer(args, model.parameters()),
        named_parameters=model.named_parameters(),
        # Horovod: half the bytes: each gradient is cast to fp16, averaged in fp16, and cast back.
        compression=hvd.Compression.fp16 if args.compression == "fp16" else hvd.Compression.none,
        # Horovod: gradients are exchanged only in the last of the accumulated passes.
        backward_passes_per_step=args.accumulate_steps,
    )


def train_one_epoch(job: Job, world: World) -> int:
    """Train to the epoch's end, or until a vote ends it; return that vote: GO, STOP or FAIL."""
    args, position, accumulate = job.args, job.position, job.args.accumulate_steps
    decision = GO
    job.model.train()
    job.begin_epoch()
    shares = (shard(batch, world.rank, world.world_size) for batch in job.global_batches())
    for images, labels in job.data.train.batches(shares, position.epoch):
        # Horovod: each rank sends its vote, 4 bytes; it is read after backward, so nobody waits for it.
        if is_vote_due := job.is_vote_due(world.world_size):
            vote = torch.tensor(job.stop.vote, dtype=torch.int32)
            voting = hvd.allreduce_async(vote, op=hvd.Max, name="vote")

        seed_step(args.seed, position.step, world.rank, world.device)
        loss_sum = torch.zeros((), device=world.device)
        parts = zip(images.tensor_split(accumulate), labels.tensor_split(accumulate), strict=True)
        for some_images, some_labels in parts:
            with autocast(args, world.device):
                loss = cross_entropy(job.model(some_images), some_labels, reduction="sum")
            # Horovod: the ranks' gradients are averaged, so that this factor makes it the global batch's mean.
            loss = loss * world.world_size / args.global_batch_size
            job.scaler.scale(loss).backward()
            loss_sum += loss.detach()

        # Horovod: the gradients have arrived after this; clipping needs them before the step.
        with world.watch("gradients"):
            job.optimizer.synchronize()  # type: ignore[attr-defined]
        if is_vote_due:
            with world.watch("stop vote"):
                decision = int(hvd.synchronize(voting))
        if decision == FAIL:
            break
        rate = learning_rate(args, position.step, job.total_steps)
        set_learning_rate(job.optimizer, rate)
        with job.optimizer.skip_synchronize():  # type: ignore[attr-defined]
            optimizer_step(args, job.model.parameters(), job.optimizer, job.scaler, job.allows(loss_sum))
        job.count_step()
        if job.is_log_due():
            # Horovod: the ranks' mean is the global batch's loss: 4 bytes a rank, once in --log-every steps.
            with world.watch("metrics"):
                loss_mean = hvd.allreduce(loss_sum, op=hvd.Average, name="loss").item()
            job.log_step(loss_mean, rate)
        if decision == STOP:
            break
        if job.is_checkpoint_due():
            save_checkpoint(job, world)
    job.pause()
    return decision


@torch.no_grad()
def evaluate(job: Job, world: World) -> dict[str, float]:
    """Return test_loss and test_accuracy over the whole test set, each sample counted once."""
    # Horovod: each rank has batch-norm statistics of its own batches; all evaluate with rank 0's.
    with world.watch("evaluation"):
        hvd.broadcast_parameters(dict(job.model.named_buffers()), root_rank=0)
    job.model.eval()
    totals = new_totals(world.device)
    share = shard(torch.arange(len(job.data.test)), world.rank, world.world_size)
    for images, labels in job.data.test.batches(share.split(EVAL_BATCH_SIZE), job.position.epoch):
        with autocast(job.args, world.device):
            logits = job.model(images)
        add_batch(totals, logits, labels)
    totals[3] += job.data.train.skipped + job.data.test.skipped
    # Horovod: adds up sums and counts, 40 bytes a rank; the averages are taken after it. The sum is the result:
    # the argument stays as it is.
    with world.watch("evaluation"):
        return averages(hvd.allreduce(totals, op=hvd.Sum, name="totals"), len(job.data.test))


def save_checkpoint(job: Job, world: World, is_best: bool = False) -> None:
    """Write a checkpoint on rank 0; a failure is voted on in a later step. Call it on all ranks."""
    # Horovod: all ranks hold the same weights; rank 0 (of the world, not of each node) writes them.
    if job.record:
        job.save(is_best)


def train(args: Options, stop: Stop, world: World) -> None:
    """Set everything up, train epoch by epoch, and leave a checkpoint behind."""
    data = load_same_data(args, "horovod", world, on_bad_image=stop.fail)
    run_on_all_ranks(lambda: check_batch(args, world.world_size, len(data.train)), world)
    # Horovod: every rank draws the same weights from --seed.
    model = run_on_all_ranks(lambda: build_model(args, data), world).to(world.device)
    with world.watch("model", computes=True):
        optimizer = wrap(model, args, world)
    job = Job(args, data, world.device, model, optimizer, build_scaler(args, world.device), stop)

    # Horovod: rank 0 opens the record and reads the checkpoint; its content, the whole state, goes to all ranks.
    # (hvd.broadcast_optimizer_state would do for the optimizer, but takes a step on one that has no state yet.)
    begin_run(job, "horovod", world)

    while not job.is_complete:
        decision = train_one_epoch(job, world)
        if decision == STOP:
            save_checkpoint(job, world)
        raise_on_all_ranks(stop.error, world)
        if decision == STOP:
            job.leave()
            return
        averages = evaluate(job, world)
        is_best = job.end_epoch(averages)
        save_checkpoint(job, world, is_best)
        raise_on_all_ranks(stop.error, world)
    job.finish(world.world_size)


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the options say; call it on every rank."""
    args = refusal = None
    if hvd is None:
        options(argv)
        raise UserError("Horovod is not built for this Python; run `make horovod`", on_every_node=True)
    try:
        args = options(argv)
        # Horovod: bounds the wait for a rank that is alive and does not come; a dead one is noticed at once.
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(round(args.timeout_s / 3) or 1))
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(round(args.timeout_s) or 1))
    except UserError as error:
        refusal = error
    # Horovod: all processes meet; only then does each know whether it is rank 0, which speaks for all.
    hvd.init()
    os.environ.update(RANK=str(hvd.rank()), LOCAL_RANK=str(hvd.local_rank()))
    if args is None:
        raise cast(UserError, refusal)
    stop = Stop()
    choose_kernels(args)
    world = join_world(args)
    try:
        train(args, stop, world)
    except UserError:
        leave_world(world)
        raise
    leave_world(world)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
