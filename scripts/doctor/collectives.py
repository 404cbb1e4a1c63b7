"""One rank of the doctor's own short job: the map of ranks, an all-reduce of known sum, the bandwidth of links.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
        python -m scripts.doctor.collectives --result result.json --device auto --timeout-s 30

scripts/doctor/ranks.py starts it. The result file always says how far this rank has come: of a rank that hangs and
is killed it is the last word.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from recipes.common.ranks import Ranks, read_ranks
from recipes.probe.train import TorchWorld, gather_map

SUM_ELEMENTS = 1 << 20
"""4 MiB of float32: several pieces of every algorithm and protocol that gloo and NCCL choose among."""

LINK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Of one exchange: 1 MiB over gloo, 64 MiB over NCCL, whose links are some hundred times as fast."""

LINK_TIME_S = 0.1
MAX_REPEATS = 64
BATCHES = 3
"""The fastest counts: what else runs on a node slows one down now and then, a bad link slows all."""

MAX_ROUNDS = 31
"""In each round every node talks to another one. With more nodes than this not all links are measured, but each
node is, often enough."""


class Diary:
    """What this rank has found out so far, in a file that is whole at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}

    def note(self, **entries: Any) -> None:
        """Add entries."""
        self.entries |= entries
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.entries))
        temporary.replace(self.path)


def check_sum(world: TorchWorld, diary: Diary) -> None:
    """Compare an all-reduce with the sum that it has to be; call it on all ranks.

    Element i of rank r is (r + 1) x (i mod 7 + 1): whole numbers, which float32 adds exactly in any order.
    """
    size = world.ranks.world_size
    pattern = torch.arange(SUM_ELEMENTS, device=world.device).remainder(7).add(1).to(torch.float32)
    values = pattern * (world.ranks.rank + 1)
    # Doctor: 4 MiB a rank, over the connections that gradients take.
    dist.all_reduce(values)
    wrong = int((values != pattern * (size * (size + 1) // 2)).sum())
    diary.note(wrong_elements=wrong)


def rounds_of(nodes: int) -> list[list[tuple[int, int]]]:
    """Return a tournament: in each round each node meets another, and after all rounds every other one once."""
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def exchange(peer: int, data: torch.Tensor, into: torch.Tensor, repeats: int) -> float:
    """Send and receive at once, as each link of a ring all-reduce does; return the seconds of one exchange."""
    if data.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        operations = [dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, into, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    if data.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def measure_links(world: TorchWorld, diary: Diary) -> None:
    """Measure the link of each two nodes, between their first ranks; call it on all ranks."""
    ranks = world.ranks
    nodes, node = ranks.world_size // ranks.local_world_size, ranks.rank // ranks.local_world_size
    data = torch.zeros(LINK_BYTES[world.device.type] // 4, device=world.device)
    into = torch.empty_like(data)
    links: dict[str, float] = {}
    control = cast(dist.ProcessGroup, world.control)
    for number, pairs in enumerate(rounds_of(nodes)[:MAX_ROUNDS]):
        other = next((a + b - node for a, b in pairs if node in (a, b)), None) if ranks.local_rank == 0 else None
        diary.note(stage=f"bandwidth, round {number + 1}" + ("" if other is None else f", with node {other}"))
        peer = None if other is None else other * ranks.local_world_size
        once = torch.zeros(1)
        if peer is not None:
            exchange(peer, data, into, 1)  # makes the connection
            once[0] = exchange(peer, data, into, 1)
        # Doctor: 4 bytes a rank; both ends have to repeat as often, and all begin together.
        dist.all_reduce(once, op=dist.ReduceOp.MAX, group=control)
        repeats = int(min(MAX_REPEATS, max(1.0, LINK_TIME_S / max(float(once), 1e-6))))
        if peer is not None:
            seconds = min(exchange(peer, data, into, repeats) for _ in range(BATCHES))
            links[str(other)] = round(data.nbytes * 8 / seconds / 1e9, 4)
            diary.note(links_gbit_s=links)


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--timeout-s", type=float, default=30.0)
    args = parser.parse_args()
    diary = Diary(args.result)
    ranks: Ranks = read_ranks("probe")
    diary.note(rank=ranks.rank, stage="meeting the other ranks")
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        # rendezvous, process groups and connections, each with the bound
        world = TorchWorld(args, ranks)  # type: ignore[arg-type]
        dist.barrier(group=cast(dist.ProcessGroup, world.control))
        diary.note(
            stage="the map of ranks", device=str(world.device), joined_s=round(time.monotonic() - started, 2)
        )
        rows, total = gather_map(world), world.add_up(ranks.rank + 1)
        diary.note(stage="all-reduce", map={"world_size": len(rows), "sum": total, "ranks": rows})
        check_sum(world, diary)
        measure_links(world, diary)
        diary.note(stage="leaving")
        world.leave()
        diary.note(stage="done")
    except (RuntimeError, ValueError) as error:
        diary.note(error=" ".join(str(error).split())[:400])
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
