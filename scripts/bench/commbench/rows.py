"""What is measured: latencies, the bandwidths that follow from them, and the share of the link."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.launch.command import Column


@dataclass(frozen=True)
class Row:
    """One operation of one size on one backend."""

    backend: str
    op: str
    bytes: int
    """Of the whole result: what an all-reduce or a broadcast leaves on each rank, all parts of an all-gather."""
    ranks: int
    device: str
    latency_us: float  # of the rank that it took longest, the median over the calls
    calls: int

    @property
    def algorithm_gb_s(self) -> float:
        """Gigabytes of the result per second."""
        return self.bytes / self.latency_us / 1e3

    @property
    def bus_gb_s(self) -> float:
        """Gigabytes per second that the best algorithm sends through each rank's link at this speed."""
        return self.algorithm_gb_s * bus_factor(self.op, self.ranks)

    def link_share(self, link_gbit: float | None) -> float | None:
        """Return the share of a link's speed that is used; None where that is not known."""
        return self.bus_gb_s * 8 / link_gbit if link_gbit else None

    def as_dict(self, link_gbit: float | None) -> dict[str, Any]:
        """Return the row as the JSON file has it."""
        derived = {"algorithm_gb_s": self.algorithm_gb_s, "bus_gb_s": self.bus_gb_s}
        return {**asdict(self), **derived, "link_share": self.link_share(link_gbit)}


COLUMNS = (
    Column("backend", "backend"),
    Column("op", "op"),
    Column("bytes", "bytes", "{:,}"),
    Column("latency us", "latency_us", "{:,.1f}"),
    Column("algorithm GB/s", "algorithm_gb_s", "{:#.3g}"),
    Column("bus GB/s", "bus_gb_s", "{:#.3g}"),
    Column("of the link", "link_share", "{:.1%}"),
)
"""Of Row.as_dict()."""


def bus_factor(op: str, ranks: int) -> float:
    """Return by what the algorithm's bandwidth is multiplied to compare it with a link's.

    They are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md): what a rank has to send at least, as a share of the
    result's bytes.
    """
    return {"all-reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "all-gather": (ranks - 1) / ranks}[op]


def link_speed(interface: str) -> float | None:
    """Return an interface's speed in Gbit/s as its driver tells it; None for one that has none (lo, veth)."""
    try:
        megabits = int(Path(f"/sys/class/net/{interface}/speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits / 1000 if megabits > 0 else None
