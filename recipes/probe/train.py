"""Which process is which: the map of ranks, nodes and devices that a launcher gives, proven by an all-reduce.

    make run RECIPE=probe NODES=2 NPROC_PER_NODE=2
    mpirun -q -np 4 python -m scripts.mpirun recipes.probe.train

Success: the last line is `probe {"world_size": 4, "sum": 10, "ranks": [...]}`, the same under every launcher.
It trains nothing; run it first on a new cluster, and where a job hangs.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from recipes.common.entry import exit_status
from recipes.common.errors import UserError
from recipes.common.options import Options, Parser, one_of, parse, positive_float
from recipes.common.ranks import Ranks, read_ranks
from recipes.common.signals import Stop

COLUMNS = ("rank", "local_rank", "node_rank", "world_size", "local_world_size", "host", "device", "pid")


def options(argv: Sequence[str] | None = None) -> Options:
    """Return the options of this recipe; raises UserError for what cannot work."""
    parser = Parser("python -m recipes.probe.train", (__doc__ or "").split("\n")[0])
    parser.add_argument("--device", type=one_of("auto", "cpu", "cuda"), default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--timeout-s",
        type=positive_float,
        default=300.0,
        metavar="S",
        help="longest wait for another rank, in seconds, before the job ends with an error",
    )
    return parse(parser, argv)


@dataclass(frozen=True)
class World:
    """This process among the others."""

    ranks: Ranks
    device: torch.device
    control: dist.ProcessGroup
    """A gloo group for what ranks exchange on the CPU."""


def join_world(args: Options) -> World:
    """Choose this process's device and connect it with the other processes, as every recipe does."""
    ranks = read_ranks("probe")
    use_cuda = args.device != "cpu" and torch.cuda.device_count() >= ranks.local_world_size
    if args.device == "cuda" and not use_cuda:
        raise UserError(
            f"--device cuda: {ranks.local_world_size} processes on {socket.gethostname()} want a GPU each, "
            f"{torch.cuda.device_count()} visible; lower NPROC_PER_NODE or use --device cpu",
            on_every_node=True,
        )
    device = torch.device("cuda", ranks.local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=args.timeout_s)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo", timeout=timeout)
    control = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    return World(ranks, device, control)


def leave_world(world: World) -> None:
    """Disconnect, once no rank waits for another any more."""
    dist.barrier(group=world.control)
    dist.destroy_process_group()


def gather_map(world: World) -> list[dict[str, Any]]:
    """Return a row of COLUMNS for each rank, in their order; call it on all ranks."""
    own = {
        **vars(world.ranks),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "pid": os.getpid(),
    }
    # Probe: gathers some 200 bytes from every rank.
    rows: list[dict[str, Any]] = [{}] * world.ranks.world_size
    dist.all_gather_object(rows, own, group=world.control)
    # Ranks are counted node by node, so that each local rank 0 begins the next node. A host's name tells less: one
    # host can play several nodes.
    node_rank = -1
    for row in rows:
        node_rank += row["local_rank"] == 0
        row["node_rank"] = node_rank
    return [{name: row[name] for name in COLUMNS} for row in rows]


def add_up(world: World) -> int:
    """Return 1 + 2 + ... + world_size, added up by all ranks on their devices; call it on all ranks."""
    number = torch.tensor(world.ranks.rank + 1, dtype=torch.int64, device=world.device)
    # Probe: 8 bytes a rank, over the connections that gradients would take (NCCL between GPUs, else gloo).
    dist.all_reduce(number)
    return int(number)


def check(rows: list[dict[str, Any]], total: int) -> None:
    """Raise UserError for a map or a sum that is wrong; every rank sees the same and ends the same way."""
    size = len(rows)
    if total != size * (size + 1) // 2:
        raise UserError(f"the all-reduce of 1..{size} gave {total}: the ranks are not one group; see the launcher")
    for before, row in zip([{"local_rank": -1}, *rows], rows, strict=False):
        if row["local_rank"] not in (0, before["local_rank"] + 1):
            raise UserError(
                f"rank {row['rank']} on {row['host']} has local rank {row['local_rank']} after "
                f"{before['local_rank']}: ranks have to be counted node by node; see the launcher's mapping option"
            )


def show(rows: list[dict[str, Any]], total: int) -> None:
    """Print the map as a table and as one line of JSON."""
    table = [COLUMNS, *(tuple(str(row[name]) for name in COLUMNS) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    for line in table:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
    print("probe", json.dumps({"world_size": len(rows), "sum": total, "ranks": rows}), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Meet, compare notes, and print what rank 0 has gathered; call it on every rank."""
    args = options(argv)
    Stop()
    world = join_world(args)
    rows, total = gather_map(world), add_up(world)
    leave_world(world)
    check(rows, total)
    if world.ranks.rank == 0:
        show(rows, total)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
