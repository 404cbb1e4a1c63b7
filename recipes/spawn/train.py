"""torch.multiprocessing.spawn in place of torchrun: one starter per node makes the ranks, DDP connects them.

    make run RECIPE=spawn NODES=2
    .venv/bin/python -m recipes.spawn.train --nproc-per-node 2
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
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.synchronize import Event
from types import FrameType
from typing import cast

import torch.multiprocessing as mp

from recipes.common.arguments import non_negative_int, option, positive_int
from recipes.common.data.workers import start_tracker
from recipes.common.errors import UserError
from recipes.common.options import parse
from recipes.common.process.entry import LOST_RANK_STATUS, run_main
from recipes.common.process.node import Failure, Node, check_head, read_master, status_of
from recipes.common.process.parent import end_with_parent
from recipes.common.process.ranks import Ranks, read_ranks
from recipes.common.process.signals import STOP_SIGNALS, Stop, handle_stop_signals
from recipes.common.process.stuck import STUCK_S, StuckRankError
from recipes.common.world.world import connected_world
from recipes.ddp.train import DDPOptions, train  # spawn replaces its launcher; the ranks are ddp's

FAILURE_GRACE_S = 4.0
"""How long a node's other ranks may report after one has failed."""

RENDEZVOUS_GRACE_S = 20.0
"""Longest wait for other nodes' ranks after a stop signal: ranks that have not met lose no work."""


@dataclass(frozen=True)
class SpawnOptions(DDPOptions):
    """Spawn."""

    # Spawn: the counterparts of torchrun's own options; scripts/launch.sh sets them.
    nnodes: int = option(1, positive_int, "starters, one on each node", "N")
    node_rank: int = option(0, non_negative_int, "which node this is", "R")
    nproc_per_node: int = option(1, positive_int, "ranks to start here", "N")
    rdzv_timeout_s: int = option(300, positive_int, "longest wait for node 0 to answer", "S")


options = partial(parse, SpawnOptions, "spawn", __doc__)


def run_rank(args: SpawnOptions, ranks: Ranks, has_met: Event | None = None) -> None:
    """Train as one of the ranks, as main() does in ddp."""
    stop = Stop()
    # Spawn: each rank registers its rank and world size at MASTER_ADDR:MASTER_PORT; begin_rank() computes them.
    with connected_world(args, ranks) as world:
        if has_met:
            has_met.set()
        train(args, "spawn", world, stop)


def begin_rank(local_rank: int, args: SpawnOptions, node: Node, starter: int, has_met: Event) -> None:
    """Run one of the node's ranks, and exit with its status."""
    # Spawn: if the parent ends, mp.spawn sends a rank SIGINT, which has no effect while it waits in a collective.
    end_with_parent(starter)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the starter too, which ends its ranks
    # Spawn: mp.spawn gives a process only its local rank. Rank and world size follow from it: with 2 nodes of 8,
    # the third process of node 1 is rank 1 * 8 + 2 = 10 of 16.
    ranks = Ranks(
        rank=node.node_rank * node.nproc_per_node + local_rank,
        local_rank=local_rank,
        world_size=node.nnodes * node.nproc_per_node,
        local_world_size=node.nproc_per_node,
    )
    own = {"RANK": ranks.rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks.local_world_size}
    os.environ.update({name: str(value) for name, value in own.items()})  # error messages name them
    try:
        status = run_main(lambda: run_rank(args, ranks, has_met))
    except Exception:
        traceback.print_exc()  # Spawn: mp.spawn would show it only in its join(), which is not used here
        status = 1
    sys.exit(status)


def start_ranks(args: SpawnOptions, node: Node, has_met: Event) -> mp.ProcessContext:
    """Start this node's ranks with the stop signals blocked; a rank unblocks them once it handles them.

    SIGINT is blocked, too: a starter that ends before a rank has read what to run would leave its traceback.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGINT))
    # Spawn: each rank is a new interpreter that imports this module and torch before it calls begin_rank. fork
    # would avoid that, but CUDA and OpenMP do not survive it. join=False, because mp.spawn's join() sends the
    # other ranks TERM after a failure, which they take for "write a checkpoint", and KILL 30 s later.
    arguments = (args, node, os.getpid(), has_met)
    return cast(mp.ProcessContext, mp.spawn(begin_rank, arguments, nprocs=node.nproc_per_node, join=False))


def wait_for_ranks(context: mp.ProcessContext, has_met: Event) -> list[int | None]:
    """Wait until all ranks have ended, or FAILURE_GRACE_S after one has failed; forward stop signals to them.

    Also stop waiting for ranks that have not met RENDEZVOUS_GRACE_S after a stop signal. Return each rank's exit
    status: negative for a signal, None if it still runs.
    """
    received: list[int] = []
    handle_stop_signals(lambda number, frame: received.append(number))
    deadline = rendezvous_deadline = math.inf
    while time.monotonic() < deadline:
        running = [process for process in context.processes if process.exitcode is None]
        if not running:
            break
        if deadline == math.inf and any(process.exitcode for process in context.processes):
            deadline = time.monotonic() + FAILURE_GRACE_S
        while received:
            passed_on = received.pop()
            rendezvous_deadline = min(rendezvous_deadline, time.monotonic() + RENDEZVOUS_GRACE_S)
            for process in running:
                os.kill(process.pid, passed_on)
        if time.monotonic() > rendezvous_deadline and not has_met.is_set():
            print(f"stopped by {signal.Signals(passed_on).name} before the ranks had met", flush=True)
            break
        connection.wait([process.sentinel for process in running], timeout=0.1)
    return [process.exitcode for process in context.processes]


def leave_stuck_rank(context: mp.ProcessContext, first: int, status: int) -> None:
    """Wait for the ranks, all of them killed; end this process if one does not end, as for a dead file server.

    At its exit, multiprocessing would wait for that rank without a limit. `first` is the node's first rank, and
    `status` that of the other ranks.
    """
    deadline = time.monotonic() + STUCK_S
    for rank, process in enumerate(context.processes, start=first):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            print(f"error: {StuckRankError(rank, process.pid)}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(status or StuckRankError.status)


def leave_early(number: int, frame: FrameType | None) -> None:
    """Exit on a stop signal before any rank has started."""
    print(f"stopped by {signal.Signals(number).name} before any rank had started", flush=True)
    sys.exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    """Start this node's ranks and wait until they end; call it once on each node."""
    args = options(argv)
    if "LOCAL_RANK" in os.environ:  # a launcher has started all ranks; this is one of them
        run_rank(args, read_ranks("spawn"))
        return
    handle_stop_signals(leave_early)
    if args.node_rank >= args.nnodes:
        raise UserError(f"--node-rank {args.node_rank} of --nnodes {args.nnodes}: node ranks count from 0")
    addr, port = read_master(args.nnodes)
    node = Node(args.nnodes, args.node_rank, args.nproc_per_node, addr, port, args.rdzv_timeout_s)
    check_head(node)
    os.environ.update(MASTER_ADDR=addr, MASTER_PORT=str(port), LOST_RANK_STATUS=str(LOST_RANK_STATUS))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: else each rank has a thread per core
    start_tracker()  # else the event starts it, without blocking the stop signals there
    has_met = mp.get_context("spawn").Event()
    context = start_ranks(args, node, has_met)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        statuses = wait_for_ranks(context, has_met)
    finally:
        for process in context.processes:
            process.kill()
    first = node.node_rank * node.nproc_per_node
    ended = enumerate(zip(statuses, context.pids(), strict=True), start=first)
    failed = {rank: Failure(status, pid) for rank, (status, pid) in ended if status}
    status = status_of(failed) if failed else 0
    leave_stuck_rank(context, first, status)
    if status:
        sys.exit(status)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
