"""Which process is which: the map of ranks, nodes and devices that a launcher gives, checked by an all-reduce.

    make run RECIPE=probe NODES=2 NPROC_PER_NODE=2
    mpirun -np 4 .venv/bin/python -m scripts.launch.mpirun recipes.probe.train
    .venv/bin/horovodrun --gloo -np 4 .venv/bin/python -m recipes.probe.train --join horovod
    MASTER_ADDR=a .venv/bin/python -m recipes.probe.train --join spawn --nnodes 2 --node-rank 0 --nproc-per-node 2

Success: the last line is `probe {"world_size": 4, "sum": 10, "ranks": [...]}`, the same under every launcher.
It trains nothing. Run it first on a new cluster, and when a job hangs.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from recipes.common.arguments import choice, non_negative_int, one_of, option, positive_int, seconds
from recipes.common.data.workers import start_tracker
from recipes.common.errors import UserError
from recipes.common.options import parse
from recipes.common.process.entry import run_main
from recipes.common.process.node import read_master
from recipes.common.process.parent import end_with_parent
from recipes.common.process.ranks import Ranks, read_ranks
from recipes.common.process.signals import STOP_SIGNALS, Stop, block_signals, handle_stop_signals
from recipes.common.record.progress import say
from recipes.common.watch.timeouts import set_horovod_timeout
from recipes.common.world.devices import agree_on_device, choose_device
from recipes.common.world.world import NO_PICKLE, connect

# A rank that fails prints its reason in one line; torch would also log how it then ends the other ranks.
logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)

ENDS_STARTER = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that end a starter of ranks (--join spawn), and its ranks with it."""

COLUMNS = ("rank", "local_rank", "node_rank", "world_size", "local_world_size", "host", "device", "pid")


@dataclass(frozen=True)
class ProbeOptions:
    """Probe."""

    device: str = choice("auto: GPUs where there are any", "auto", "cpu", "cuda")
    timeout_s: float = option(
        300.0, seconds, "longest wait for another rank, in seconds, before the job ends with an error", "S"
    )
    join: str = option(
        "torch",
        one_of("torch", "spawn", "horovod"),
        "how processes meet: torch (a launcher has started all), spawn (this starts its node's own), or horovod",
    )
    nnodes: int = option(1, positive_int, "spawn: number of nodes", "N")
    node_rank: int = option(0, non_negative_int, "spawn: this node", "R")
    nproc_per_node: int = option(1, positive_int, "spawn: ranks here", "N")


options = partial(parse, ProbeOptions, "probe", __doc__)


class TorchWorld:
    """Ranks connected by torch.distributed, as in ddp and spawn."""

    def __init__(self, ranks: Ranks, device: str, timeout_s: float) -> None:
        self.ranks = ranks
        self.device, self.control = connect(device, ranks, timedelta(seconds=timeout_s))

    def gather(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's row."""
        # Probe: gathers some 200 bytes from every rank.
        rows: list[dict[str, Any]] = [{}] * self.ranks.world_size
        dist.all_gather_object(rows, row, group=self.control, **NO_PICKLE)
        return rows

    def add_up(self, number: int) -> int:
        """Return the sum of the ranks' numbers."""
        # Probe: 8 bytes a rank, over the connections that gradients use (NCCL between GPUs, else gloo).
        total = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(total)
        return int(total)

    def leave(self) -> None:
        """Disconnect once no rank waits for another; call it on all ranks."""
        dist.barrier(group=self.control)
        dist.destroy_process_group()


class HorovodWorld:
    """Ranks connected by Horovod."""

    def __init__(self, device: str, timeout_s: float) -> None:
        try:
            import horovod.torch as hvd
        except ModuleNotFoundError as error:
            if error.name != "horovod":
                raise
            reason = "Horovod is not built for this Python; run `make horovod`"
            raise UserError(reason, on_every_node=True) from None
        # Horovod: bounds the wait for a rank that is alive but does not join; a dead rank is noticed at once.
        set_horovod_timeout(timeout_s)
        hvd.init()
        os.environ.update(RANK=str(hvd.rank()), LOCAL_RANK=str(hvd.local_rank()))  # only rank 0 prints an error
        self.hvd = hvd
        self.ranks = Ranks(hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size())
        self.device = agree_on_device(
            lambda: choose_device(device, self.ranks, has_nccl=hvd.nccl_built()),
            self.ranks.rank,
            # Probe: gathers each rank's kind of device and its host.
            lambda kind, text: dict(reversed(hvd.allgather_object((kind, text), name="device"))),
        )

    def gather(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's row."""
        # Probe: gathers some 200 bytes from every rank.
        return self.hvd.allgather_object(row, name="rows")

    def add_up(self, number: int) -> int:
        """Return the sum of the ranks' numbers."""
        # Probe: 8 bytes a rank, over the connections that gradients use.
        own = torch.tensor([number], dtype=torch.int64, device=self.device)
        return int(self.hvd.allreduce(own, op=self.hvd.Sum, name="sum"))

    def leave(self) -> None:
        """Disconnect once no rank waits for another; call it on all ranks."""
        self.hvd.barrier()
        self.hvd.shutdown()


World = TorchWorld | HorovodWorld


def gather_map(world: World) -> list[dict[str, Any]]:
    """Return a row of COLUMNS for each rank, in rank order; call it on all ranks."""
    own = {
        **vars(world.ranks),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "pid": os.getpid(),
    }
    rows = world.gather(own)
    # Ranks are counted node by node: each local rank 0 begins a node. A host may have several nodes.
    node_rank = -1
    for row in rows:
        node_rank += row["local_rank"] == 0
        row["node_rank"] = node_rank
    return [{name: row[name] for name in COLUMNS} for row in rows]


def check(rows: list[dict[str, Any]], total: int) -> None:
    """Raise UserError if the map or the sum is wrong; all ranks see the same values, so all of them raise."""
    size = len(rows)
    if total != size * (size + 1) // 2:
        raise UserError(f"the all-reduce of 1..{size} gave {total}: the ranks are not one group; see the launcher")
    before = -1
    for row in rows:
        if row["local_rank"] not in (0, before + 1):
            what = f"rank {row['rank']} on {row['host']} has local rank {row['local_rank']} after {before}"
            fix = "see the launcher's mapping option"
            raise UserError(f"{what}: ranks have to be counted node by node; {fix}")
        before = row["local_rank"]


def show(rows: list[dict[str, Any]], total: int) -> None:
    """Print the map as a table and as one line of JSON; raises UserError if that fails."""
    table = [COLUMNS, *(tuple(str(row[name]) for name in COLUMNS) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    fix = "redirect it to a file"
    say("\n".join(lines), fix)
    text = json.dumps({"world_size": len(rows), "sum": total, "ranks": rows})
    say(f"probe {text}", fix)  # a write of its own: mpirun marks each write with the rank


def report(world: World) -> None:
    """Gather the map and the sum, check them on every rank, and print them on rank 0."""
    rows, total = gather_map(world), world.add_up(world.ranks.rank + 1)
    world.leave()
    check(rows, total)
    if world.ranks.rank == 0:
        show(rows, total)


def be_spawned(local_rank: int, args: ProbeOptions, starter: int) -> None:
    """Run one of the node's ranks, whose rank follows from node and local rank; exit with its status."""
    end_with_parent(starter)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # mp.spawn ends the others by TERM once one fails
    rank = args.node_rank * args.nproc_per_node + local_rank
    ranks = Ranks(rank, local_rank, args.nnodes * args.nproc_per_node, args.nproc_per_node)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank))  # only rank 0 prints an error
    sys.exit(run_main(lambda: report(TorchWorld(ranks, args.device, args.timeout_s))))


def leave_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End this starter at a signal, and its ranks with it: there is nothing to save."""
    for rank in mp.active_children():
        rank.kill()
    if number == signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    print(f"stopped by {signal.Signals(number).name}", flush=True)
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    """Connect, gather the map of ranks, and print it on rank 0; call it on every rank (spawn: on every node)."""
    args = options(argv)
    if args.join == "spawn":
        handle_stop_signals(leave_at_once)
        signal.signal(signal.SIGINT, leave_at_once)  # by itself, Python would wait for the ranks
        if args.node_rank >= args.nnodes:
            raise UserError(f"--node-rank {args.node_rank} of --nnodes {args.nnodes}: node ranks count from 0")
        addr, port = read_master(args.nnodes)
        os.environ.update(MASTER_ADDR=addr, MASTER_PORT=str(port))
        # A starter that ends before a rank has read what to run would leave that rank's traceback.
        start_tracker()  # else mp.spawn starts it, which unblocks TERM
        with block_signals(*ENDS_STARTER):
            context = mp.spawn(be_spawned, (args, os.getpid()), nprocs=args.nproc_per_node, join=False)
        try:
            while not context.join():
                pass
        except mp.ProcessExitedException as error:
            if error.signal_name:
                raise
            sys.exit(error.exit_code)
        return
    Stop()
    if args.join == "horovod":
        report(HorovodWorld(args.device, args.timeout_s))
    else:
        report(TorchWorld(read_ranks("probe"), args.device, args.timeout_s))


if __name__ == "__main__":
    raise SystemExit(run_main(main))
