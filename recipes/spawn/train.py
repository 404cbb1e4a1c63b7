"""torch.multiprocessing.spawn in place of torchrun: one starter per node makes the ranks, DDP connects them.

    make run RECIPE=spawn NODES=2
    .venv/bin/python -m recipes.spawn.train --nproc-per-node 2 --epochs 30
    MASTER_ADDR=node-a .venv/bin/python -m recipes.spawn.train --nnodes 2 --node-rank 1 --nproc-per-node 8

Success: the last line is `result recipe=spawn world_size=2 test_accuracy=0.98.. samples_per_s=...`.
Source: https://docs.pytorch.org/docs/stable/multiprocessing.html#spawning-subprocesses.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.synchronize import Event
from types import FrameType
from typing import cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
from recipes.common.node import Node, check_head, read_master, status_of
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
    non_negative_int,
    one_of,
    parse,
    positive_float,
    positive_int,
)
from recipes.common.parent import end_with_parent
from recipes.common.ranks import Ranks, read_ranks
from recipes.common.seeding import choose_kernels, seed_step
from recipes.common.signals import FAIL, GO, STOP, STOP_SIGNALS, Stop
from recipes.common.workers import start_tracker
from recipes.common.world import World, join_world, leave_world

GRACE_S = 4.0
"""How long a node's other ranks may take to say what they have seen, once one has failed."""

MEETING_S = 10.0
"""How long ranks that have not met the others yet may take after a stop signal; nothing is lost with them."""


def options(argv: Sequence[str] | None = None) -> Options:
    """Return the options of this recipe; raises UserError for what cannot work."""
    parser = build_parser("spawn", __doc__)
    # Spawn: what torchrun's own options are to ddp; scripts/launch.sh fills them in.
    group = parser.add_argument_group("spawn")
    group.add_argument("--nnodes", type=positive_int, default=1, metavar="N", help="starters, one on each node")
    group.add_argument("--node-rank", type=non_negative_int, default=0, metavar="R", help="which node this is")
    group.add_argument("--nproc-per-node", type=positive_int, default=1, metavar="N", help="ranks to start here")
    group.add_argument(
        "--rdzv-timeout-s", type=positive_int, default=300, metavar="S", help="longest wait for node 0 to answer"
    )
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
    data = load_same_data(args, "spawn", world, on_bad_image=stop.fail)
    run_on_all_ranks(lambda: check_batch(args, world.world_size, len(data.train)), world)
    # DDP: every rank draws the same weights from --seed.
    model = run_on_all_ranks(lambda: build_model(args, data), world).to(world.device)
    with world.watch("model", computes=True):
        ddp = wrap(model, args, world, data)
    optimizer = shard_optimizer(model, args) if args.zero else build_optimizer(args, model.parameters())
    job = Job(args, data, world.device, model, optimizer, build_scaler(args, world.device), stop)

    # DDP: rank 0 opens the record and reads the checkpoint; its content, the whole state, goes to all ranks.
    begin_run(job, "spawn", world)

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


def run_rank(args: Options, ranks: Ranks, has_met: Event | None = None) -> None:
    """Train as the options say, as one of the ranks; what is main() in ddp."""
    stop = Stop()
    choose_kernels(args)
    # Spawn: each rank says at MASTER_ADDR:MASTER_PORT which of how many it is, since nobody has put that into its
    # environment.
    world = join_world(args, ranks)
    if has_met:
        has_met.set()
    try:
        train(args, stop, world)
    except UserError:
        leave_world(world)
        raise
    leave_world(world)


def begin_rank(local_rank: int, args: Options, node: Node, starter: int, has_met: Event) -> None:
    """Be the local_rank-th process that the starter has made, from its first moment to its exit status."""
    # Spawn: mp.spawn asks the kernel for SIGINT, which a rank that waits in a collective never gets to see.
    end_with_parent(starter)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the starter too, which ends its ranks
    # Spawn: mp.spawn tells a process only its number on this node. Rank and world size are arithmetic:
    # with 2 nodes of 8, the third process of node 1 is rank 1 * 8 + 2 = 10 of 16.
    ranks = Ranks(
        rank=node.node_rank * node.nproc_per_node + local_rank,
        local_rank=local_rank,
        world_size=node.nnodes * node.nproc_per_node,
        local_world_size=node.nproc_per_node,
    )
    os.environ.update(RANK=str(ranks.rank), LOCAL_RANK=str(local_rank))  # for those who report an error
    try:
        status = exit_status(lambda: run_rank(args, ranks, has_met))
    except Exception:
        traceback.print_exc()  # Spawn: mp.spawn would keep it for its own join(), which is not used here
        status = 1
    sys.exit(status)


def start_ranks(args: Options, node: Node, has_met: Event) -> mp.ProcessContext:
    """Start this node's ranks, with the stop signals held back: a rank lets them in once it has its handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # Spawn: each rank is a new interpreter that imports this module, torch and all, before it calls begin_rank.
    # fork would save that and break: CUDA and OpenMP do not survive it. join=False, because mp.spawn's join()
    # ends the other ranks by TERM, which they take for "write a checkpoint", and by KILL 30 s later.
    arguments = (args, node, os.getpid(), has_met)
    return cast(mp.ProcessContext, mp.spawn(begin_rank, arguments, nprocs=node.nproc_per_node, join=False))


def wait_for_ranks(context: mp.ProcessContext, has_met: Event) -> list[int | None]:
    """Wait until all ranks have ended, or until GRACE_S after one has failed; pass the stop signals on to them.

    Return each rank's exit status, negative for a signal, None for one that still runs.
    """
    received: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    deadline = meeting_deadline = math.inf
    while time.monotonic() < deadline:
        running = [process for process in context.processes if process.exitcode is None]
        if not running:
            break
        if deadline == math.inf and any(process.exitcode for process in context.processes):
            deadline = time.monotonic() + GRACE_S
        while received:
            passed_on = received.pop()
            meeting_deadline = min(meeting_deadline, time.monotonic() + MEETING_S)
            for process in running:
                os.kill(process.pid, passed_on)
        if time.monotonic() > meeting_deadline and not has_met.is_set():
            print("stopped by a signal before the ranks had met", flush=True)
            break
        connection.wait([process.sentinel for process in running], timeout=0.1)
    return [process.exitcode for process in context.processes]


def leave_early(number: int, frame: FrameType | None) -> None:
    """End a starter that has not started anything yet."""
    print(f"stopped by {signal.Signals(number).name} before any rank had started", flush=True)
    sys.exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    """Start this node's ranks and see them to their end; call it once on each node."""
    args = options(argv)
    if "LOCAL_RANK" in os.environ:  # a launcher has started all ranks by itself, and this is one of them
        run_rank(args, read_ranks("spawn"))
        return
    for number in STOP_SIGNALS:
        signal.signal(number, leave_early)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if args.node_rank >= args.nnodes:
        raise UserError(f"--node-rank {args.node_rank} of --nnodes {args.nnodes}: node ranks count from 0")
    addr, port = read_master(args.nnodes)
    node = Node(args.nnodes, args.node_rank, args.nproc_per_node, addr, port, args.rdzv_timeout_s)
    check_head(node)
    os.environ.update(MASTER_ADDR=addr, MASTER_PORT=str(port))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: else each rank has a thread per core

    start_tracker()  # before the event, which would start it
    has_met = mp.get_context("spawn").Event()
    context = start_ranks(args, node, has_met)
    try:
        statuses = wait_for_ranks(context, has_met)
    finally:
        for process in context.processes:
            process.kill()
    first = node.node_rank * node.nproc_per_node
    failed = {first + i: status for i, status in enumerate(statuses) if status}
    if failed:
        sys.exit(status_of(failed, {first + i: pid for i, pid in enumerate(context.pids())}))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
