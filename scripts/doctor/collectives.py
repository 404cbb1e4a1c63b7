"""One rank of the doctor's own short job: the map of ranks, an all-reduce of known sum, the bandwidth of links.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
        python -m scripts.doctor.collectives --result result.json --device auto --timeout-s 30

scripts/doctor/collectives_job.py starts it. The result file always holds this rank's progress, also if the rank
hangs and is killed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from recipes.common.folders import replace_text
from recipes.common.process.ranks import Ranks, read_ranks
from recipes.probe.train import TorchWorld, gather_map
from scripts.doctor.rules import SLOW_LINK, lower_of_both

SUM_ELEMENTS = 1 << 20
"""4 MiB of float32: several chunks with every algorithm and protocol that gloo and NCCL may choose."""

LINK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Bytes of one exchange: 1 MiB over gloo, 64 MiB over NCCL, whose links are some hundred times as fast."""

LINK_TIME_S = 0.1
MAX_REPEATS = 64
BATCHES = 3
"""The fastest batch counts: other processes slow down a batch now and then, a bad link slows down all of them."""

SECOND_LOOKS, SECOND_LINKS = 2, 8
"""Repeated measurements, and links in each, of links that seem slow: a node may have been busy for a moment."""

MAX_ROUNDS = 31
"""In each round every node exchanges data with another one. With more than 32 nodes, not all links are measured,
but each node is measured in about this many rounds."""


class ResultFile:
    """This rank's results so far, in a file that is complete at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}

    def add(self, **entries: Any) -> None:
        """Add entries and replace the file."""
        self.entries |= entries
        replace_text(self.path, json.dumps(self.entries))


def pattern(numel: int, device: torch.device) -> torch.Tensor:
    """Return whole numbers from 1 to 7, float32, shape (numel,); float32 adds them exactly in any order."""
    return torch.arange(numel, device=device).remainder(7).add(1).to(torch.float32)


def map_note(rank: int, rows: list[dict[str, Any]], total: int) -> dict[str, Any]:
    """Return the map of ranks for a rank's notes, with rows on rank 0 only: node 0 gets the notes of all ranks."""
    return {"world_size": len(rows), "sum": total, "ranks": [] if rank else rows}


def factor(rank: int) -> int:
    """Return the multiple of the pattern that a rank contributes: sums of 60,000 ranks stay below 2^24."""
    return rank % 61 + 1


def check_sum(world: TorchWorld, results: ResultFile) -> None:
    """Compare an all-reduce with its known sum and note the number of wrong elements; call it on all ranks."""
    given = pattern(SUM_ELEMENTS, world.device)
    values = given * factor(world.ranks.rank)
    # Doctor: 4 MiB per rank, over the connections that gradients use.
    dist.all_reduce(values)
    wrong = int((values != given * sum(map(factor, range(world.ranks.world_size)))).sum())
    results.add(wrong_elements=wrong)


def rounds_of(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of a round-robin tournament: pairs of nodes such that each pair meets once."""
    seats = [*range(nodes + nodes % 2)]  # an odd number gets one that does not exist, whose partner rests
    rounds = []
    for _ in seats[1:]:
        pairs = [sorted((seats[i], seats[-1 - i])) for i in range(len(seats) // 2)]
        rounds.append([(a, b) for a, b in pairs if b < nodes])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def exchange(peer: int, data: torch.Tensor, into: torch.Tensor, repeats: int) -> float:
    """Send and receive at the same time, as in a ring all-reduce; return the seconds of one exchange."""
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


class Links:
    """Measures the links of this node, between ranks of the same local_rank; call each method on all ranks."""

    def __init__(self, world: TorchWorld, results: ResultFile) -> None:
        self.world, self.ranks, self.results = world, world.ranks, results
        self.nodes = self.ranks.world_size // self.ranks.local_world_size
        self.node = self.ranks.rank // self.ranks.local_world_size
        self.data = torch.zeros(LINK_BYTES[world.device.type] // 4, device=world.device)
        self.into = torch.empty_like(self.data)
        self.found: dict[int, float] = {}
        """Gbit/s to each other node, on the rail of this local_rank."""

    def measure(self, pairs: list[tuple[int, int]], what: str, local_rank: int = 0) -> None:
        """Measure some links at once, at most one per node; a link's best measurement counts.

        The ranks with this local_rank communicate, because each GPU may have a rail of its own.
        """
        is_mine = self.ranks.local_rank == local_rank
        other = next((a + b - self.node for a, b in pairs if is_mine and self.node in (a, b)), None)
        self.results.add(stage=what if other is None else f"{what}, with node {other}")
        once = torch.zeros(1)
        if other is not None:
            peer = other * self.ranks.local_world_size + local_rank
            exchange(peer, self.data, self.into, 1)  # creates the connection
            once[0] = exchange(peer, self.data, self.into, 1)
        # Doctor: 4 bytes per rank. Both ends have to repeat the same number of times, and all start together.
        dist.all_reduce(once, op=dist.ReduceOp.MAX, group=self.world.control)
        if other is not None:
            repeats = int(min(MAX_REPEATS, max(1.0, LINK_TIME_S / max(float(once), 1e-6))))
            batches = BATCHES if repeats > 1 else 1  # one batch shows such a slow link
            seconds = min(exchange(peer, self.data, self.into, repeats) for _ in range(batches))
            speed = round(self.data.nbytes * 8 / seconds / 1e9, 4)
            self.found[other] = max(speed, self.found.get(other, 0.0))
            self.results.add(**{"rail_gbit_s" if local_rank else "links_gbit_s": self.found})

    def slow(self) -> list[tuple[int, int]]:
        """Return the links of local rank 0 that are much slower than the median."""
        # Doctor: a few bytes per link from every rank.
        rows = self.world.gather({"links": {} if self.ranks.local_rank else self.found})
        per_node = self.ranks.local_world_size
        speeds = lower_of_both((rank // per_node, row["links"]) for rank, row in enumerate(rows))
        usual = median(speeds.values()) if speeds else 0.0
        return sorted(pair for pair, speed in speeds.items() if speed < SLOW_LINK * usual)


def measure_links(world: TorchWorld, results: ResultFile) -> None:
    """Measure the link of each pair of nodes, then again those that seem slow; call it on all ranks."""
    links = Links(world, results)
    for number, pairs in enumerate(rounds_of(links.nodes)[:MAX_ROUNDS]):
        links.measure(pairs, f"bandwidth, round {number + 1}")
    if world.device.type == "cuda":  # on CPUs all ranks of a node share its interface
        for local_rank in range(1, links.ranks.local_world_size):
            for pairs in rounds_of(links.nodes)[: 1 + links.nodes % 2]:
                links.measure(pairs, f"bandwidth, rail {local_rank}", local_rank)
    for _ in range(SECOND_LOOKS):
        for pair in links.slow()[:SECOND_LINKS]:
            links.measure([pair], "bandwidth, a second look")


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--timeout-s", type=float, default=30.0)
    args = parser.parse_args()
    results = ResultFile(args.result)
    ranks: Ranks = read_ranks("probe")
    results.add(rank=ranks.rank, stage="meeting the other ranks")
    torch.set_num_threads(1)
    try:
        # Rendezvous, process groups and connections each have this time limit.
        world = TorchWorld(ranks, args.device, args.timeout_s)
        dist.barrier(group=world.control)
        results.add(stage="the map of ranks", device=str(world.device))
        rows, total = gather_map(world), world.add_up(ranks.rank + 1)
        results.add(stage="all-reduce", map=map_note(ranks.rank, rows, total))
        check_sum(world, results)
        measure_links(world, results)
        results.add(stage="leaving")
        world.leave()
        results.add(stage="done")
    except (RuntimeError, ValueError) as error:
        results.add(error=" ".join(str(error).split())[:400])
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
