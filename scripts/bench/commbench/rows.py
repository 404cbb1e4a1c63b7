"""What is measured: latencies, the bandwidths that follow from them, and the share of the link."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import psutil

from scripts.launch.tables import Column


@dataclass(frozen=True)
class Row:
    """The measurement of one operation at one size on one backend."""

    backend: str
    op: str
    bytes: int
    """Size of the whole result on each rank; for an all-gather, the parts of all ranks together."""
    ranks: int
    device: str
    latency_us: float  # median over the calls, of the slowest rank
    calls: int

    def as_dict(self, link_gbit: float | None) -> dict[str, Any]:
        """Return the row with its bandwidths, as in the JSON file.

        bus_gb_s is what an optimal algorithm would send through each rank's link at this speed, link_share that as
        a share of the link's speed; None if that is unknown.
        """
        algorithm = self.bytes / self.latency_us / 1e3
        bus = algorithm * bus_factor(self.op, self.ranks)
        share = bus * 8 / link_gbit if link_gbit else None
        return {**asdict(self), "algorithm_gb_s": algorithm, "bus_gb_s": bus, "link_share": share}


COLUMNS = (
    Column("backend", "backend"),
    Column("op", "op"),
    Column("bytes", "bytes", "{:,}"),
    Column("latency us", "latency_us", "{:,.1f}"),
    Column("algorithm GB/s", "algorithm_gb_s", "{:#.3g}"),
    Column("bus GB/s", "bus_gb_s", "{:#.3g}"),
    Column("of the link", "link_share", "{:.1%}"),
)
"""Columns of the table; their keys are those of Row.as_dict()."""


def bus_factor(op: str, ranks: int) -> float:
    """Return the factor that converts algorithm bandwidth to bus bandwidth, which compares with a link's speed.

    The factors are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md): the least that a rank has to send, as a
    share of the result's bytes.
    """
    return {"all-reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "all-gather": (ranks - 1) / ranks}[op]


def link_speed(interface: str) -> float | None:
    """Return an interface's speed in Gbit/s as its driver reports it; None if it reports none, as lo does."""
    found = psutil.net_if_stats().get(interface)
    return found.speed / 1000 if found and found.speed else None  # psutil: in Mbit/s, 0 if unknown
