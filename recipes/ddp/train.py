"""DistributedDataParallel: a process per GPU, gradients averaged while backward still runs.

    make run RECIPE=ddp NODES=2
    .venv/bin/torchrun --nproc-per-node=2 -m recipes.ddp.train --epochs 30

Success: the last line is `result recipe=ddp world_size=2 test_accuracy=0.98.. samples_per_s=...`.
Source: Li et al. 2020, PyTorch Distributed, https://arxiv.org/abs/2006.15704.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from recipes.common.agreement import begin_run, load_same_data, raise_on_all_ranks, run_on_all_ranks, shard
from recipes.common.buckets import NO_BUFFER_SYNC, settle_buckets
from recipes.common.data import EVAL_BATCH_SIZE, Data
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
    optimizer_class,
    optimizer_step,
    set_learning_rate,
)
from recipes.common.options import (
    Options,
    add_switch,
    build_parser,
    check_batch,
    one_of,
    parse,
    positive_float,
    positive_int,
)
from recipes.common.ranks import read_ranks
from recipes.common.seeding import choose_kernels, seed_step
from recipes.common.signals import FAIL, GO, STOP, Stop
from recipes.common.world import World, join_world, leave_world


def options(argv: Sequence[str] | None = None) -> Options:
    """Return the options of this recipe; raises UserError for what cannot work."""
    parser = build_parser("ddp", __doc__)
    group = parser.add_argument_group("DistributedDataParallel")
    group.add_argument(
        "--grad-compression",
        type=one_of("none", "fp16", "bf16", "powersgd"),
        default="none",
        help="how gradients cross the wire: none (fp32), fp16, bf16 or powersgd",
    )
    group.add_argument(
        "--powersgd-rank", type=positive_int, default=4, metavar="R", help="rank of powersgd's two factors"
    )
    group.add_argument(
        "--bucket-cap-mb",
        type=positive_float,
        metavar="MB",
        help="gradients that travel together (default: 4 on CPUs, 25 after a first 1 on GPUs)",
    )
    add_switch(group, "--zero", "shard the optimizer's state over the ranks (ZeRO stage 1)")
    return parse(parser, argv)


def wrap(model: nn.Module, args: Options, world: World, data: Data) -> DistributedDataParallel:
    """Return the model with gradients that are averaged over all ranks."""
    if args.sync_batchnorm:
        if world.device.type == "cpu" and world.world_size > 1:
            raise UserError("--sync-batchnorm: torch has it for GPUs only; drop it on the CPU")
        # DDP: batch-norm layers exchange sums and counts, 2C + 1 floats per layer and pass.
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # DDP: construction broadcasts rank 0's parameters. Backward then averages a bucket of gradients (a
    # ring all-reduce: 2 (N-1)/N of its bytes per rank) while the layers before it are still computing.
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        **NO_BUFFER_SYNC,  # evaluate() does it, once an epoch instead of once a step
        gradient_as_bucket_view=True,  # the gradients are the buckets: no second copy of the model's size
        # The last bucket is waited for: 4 MB take 33 ms at 1 Gbit/s. For NCCL's links torch has sizes of its own.
        bucket_cap_mb=args.bucket_cap_mb or (4 if world.device.type == "cpu" else None),
    )
    if args.deterministic:
        settle_buckets(ddp, data, world.device)
    register_compression(ddp, args)
    if args.compile:
        ddp.compile(mode=args.compile_mode)
    return ddp


def register_compression(ddp: DistributedDataParallel, args: Options) -> None:
    """Let buckets cross the wire in half precision or as two low-rank factors."""
    if args.grad_compression == "none":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if args.grad_compression == "powersgd":
        # DDP: an n x m gradient travels as (n + m) x rank numbers; what is lost is added to the next step's.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=args.powersgd_rank, start_powerSGD_iter=10
        )

        # DDP: a bucket is three messages, each sent once the one before has arrived. Gloo tells messages apart by
        # their order alone, which is another on each rank where two buckets are under way: one by one, then.
        def one_by_one(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 (DDP reads types)
            exchange = powerSGD_hook.powerSGD_hook(state, bucket)
            exchange.wait()
            return exchange

        ddp.register_comm_hook(state, one_by_one if ddp.device.type == "cpu" else powerSGD_hook.powerSGD_hook)
    else:
        # DDP: half the bytes; the sum is formed in half precision too.
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        ddp.register_comm_hook(None, hooks[args.grad_compression])


def shard_optimizer(model: nn.Module, args: Options) -> torch.optim.Optimizer:
    """Return an optimizer of which each rank keeps the state of a share of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # 0.7 s, paid only with --zero

    # DDP: each rank steps its share, then broadcasts it: the model's size crosses the wire once more.
    make, settings = optimizer_class(args)
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, **settings)


def train_one_epoch(job: Job, ddp: DistributedDataParallel, world: World) -> int:
    """Train to the epoch's end, or until a vote ends it; return that vote: GO, STOP or FAIL."""
    args, position, accumulate = job.args, job.position, job.args.accumulate_steps
    decision = GO
    job.model.train()
    job.begin_epoch()
    shares = (shard(batch, world.rank, world.world_size) for batch in job.global_batches())
    for images, labels in job.data.train.batches(shares, position.epoch):
        # DDP: each rank sends its vote, 4 bytes; it is read after backward, so nobody waits for it.
        if is_vote_due := job.is_vote_due(world.world_size):
            vote = torch.tensor(job.stop.vote, dtype=torch.int32)
            voting = dist.all_reduce(vote, dist.ReduceOp.MAX, group=world.control, async_op=True)

        seed_step(args.seed, position.step, world.rank, world.device)
        loss_sum = torch.zeros((), device=world.device)
        parts = zip(images.tensor_split(accumulate), labels.tensor_split(accumulate), strict=True)
        for i, (some_images, some_labels) in enumerate(parts):
            # DDP: gradients are exchanged only in the last of the accumulated passes.
            with ddp.no_sync() if i < accumulate - 1 else world.watch("gradients", computes=True):
                with autocast(args, world.device):
                    loss = cross_entropy(ddp(some_images), some_labels, reduction="sum")
                # DDP: the ranks' gradients are averaged, so that this factor makes it the global batch's mean.
                loss = loss * world.world_size / args.global_batch_size
                job.scaler.scale(loss).backward()
            loss_sum += loss.detach()

        if is_vote_due:
            with world.watch("stop vote"):
                voting.wait()
            decision = int(vote)
        if decision == FAIL:
            break
        rate = learning_rate(args, position.step, job.total_steps)
        set_learning_rate(job.optimizer, rate)
        optimizer_step(args, job.model.parameters(), job.optimizer, job.scaler, job.allows(loss_sum))
        job.count_step()
        if job.is_log_due():
            # DDP: the mean over the ranks is the global batch's loss: 4 bytes a rank, once in --log-every steps.
            with world.watch("metrics"):
                dist.all_reduce(loss_sum)
                loss_mean = loss_sum.item() / world.world_size
            job.log_step(loss_mean, rate)
        if decision == STOP:
            break
        if job.is_checkpoint_due():
            save_checkpoint(job, world)
    job.pause()
    return decision


@torch.no_grad()
def evaluate(job: Job, ddp: DistributedDataParallel, world: World) -> dict[str, float]:
    """Return test_loss and test_accuracy over the whole test set, each sample counted once."""
    # DDP: without --sync-batchnorm each rank has statistics of its own batches; all evaluate with rank 0's.
    for buffer in job.model.buffers():
        with world.watch("evaluation"):
            dist.broadcast(buffer, src=0)
    job.model.eval()
    totals = new_totals(world.device)
    share = shard(torch.arange(len(job.data.test)), world.rank, world.world_size)
    for images, labels in job.data.test.batches(share.split(EVAL_BATCH_SIZE), job.position.epoch):
        with autocast(job.args, world.device):
            logits = ddp(images)  # DDP: without gradients it exchanges nothing, and it is what --compile compiled
        add_batch(totals, logits, labels)
    totals[3] += job.data.train.skipped + job.data.test.skipped
    # DDP: adds up sums and counts, 40 bytes a rank; the averages are taken after it.
    with world.watch("evaluation"):
        dist.all_reduce(totals)
        return averages(totals, len(job.data.test))


def save_checkpoint(job: Job, world: World, is_best: bool = False) -> None:
    """Write a checkpoint on rank 0; a failure is voted on in a later step. Call it on all ranks."""
    if job.args.zero:
        # DDP: rank 0 collects the optimizer's shards.
        with world.watch("checkpoint"):
            job.optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
    # DDP: all ranks hold the same weights; rank 0 (of the world, not of each node) writes them.
    if job.record:
        job.save(is_best)


def train(args: Options, stop: Stop, world: World) -> None:
    """Set everything up, train epoch by epoch, and leave a checkpoint behind."""
    data = load_same_data(args, "ddp", world, on_bad_image=stop.fail)
    run_on_all_ranks(lambda: check_batch(args, world.world_size, len(data.train)), world)
    # DDP: every rank draws the same weights from --seed.
    model = run_on_all_ranks(lambda: build_model(args, data), world).to(world.device)
    with world.watch("model", computes=True):
        ddp = wrap(model, args, world, data)
    optimizer = shard_optimizer(model, args) if args.zero else build_optimizer(args, model.parameters())
    job = Job(args, data, world.device, model, optimizer, build_scaler(args, world.device), stop)

    # DDP: rank 0 opens the record and reads the checkpoint; its content, the whole state, goes to all ranks.
    begin_run(job, "ddp", world)

    while not job.is_complete:
        decision = train_one_epoch(job, ddp, world)
        if decision == STOP:
            save_checkpoint(job, world)
        raise_on_all_ranks(stop.error, world)
        if decision == STOP:
            job.leave()
            return
        averages = evaluate(job, ddp, world)
        is_best = job.end_epoch(averages)
        save_checkpoint(job, world, is_best)
        raise_on_all_ranks(stop.error, world)
    job.finish(world.world_size)


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the options say; call it on every rank."""
    args = options(argv)
    stop = Stop()
    choose_kernels(args)
    # DDP: a launcher (torchrun, srun, mpirun) tells each process who it is.
    world = join_world(args, read_ranks("ddp"))
    try:
        train(args, stop, world)
    except UserError:
        leave_world(world)
        raise
    leave_world(world)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
