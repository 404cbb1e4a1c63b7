"""The facts of all nodes, which rules read, and a finding, which rules return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]

PROBED = 32
"""All nodes look for the files of at most this many in the shared folder: a node without it misses any of them."""


@dataclass(frozen=True)
class Finding:
    """A fault and its remedy."""

    severity: str  # error or warning
    nodes: tuple[int, ...]
    what: str  # the fault, with the nodes' names and the offending values
    remedy: str
    rule: str = ""

    def __str__(self) -> str:
        """Return the line that is printed."""
        return f"{self.severity}: {self.what}; {self.remedy}"


@dataclass
class Case:
    """What the nodes have found out, by node rank; parts that were not reached are empty."""

    nnodes: int
    master: str = ""  # MASTER_ADDR:MASTER_PORT
    wait_s: float = 0.0
    facts: dict[int, Facts] = field(default_factory=dict)  # what node.gather returned
    refused: list[tuple[int, str]] = field(default_factory=list)  # rejected nodes: the rank each claims, and why
    messages: dict[int, str] = field(default_factory=dict)  # of nodes that did not connect, by the shared folder
    lost: dict[int, tuple[str, str]] = field(default_factory=dict)  # the order at which a node was lost, and why
    skipped: list[str] = field(default_factory=list)  # orders for which there was no time left
    clocks: dict[int, tuple[float, float]] = field(default_factory=lambda: {0: (0.0, 0.0)})
    """The seconds that a node's clock is ahead of node 0's when it connects, and the possible error."""
    written: dict[int, Facts] = field(default_factory=dict)
    seen: dict[int, list[int]] = field(default_factory=dict)
    peers: dict[int, dict[str, Facts]] = field(default_factory=dict)  # what a sees of b: peers[a][str(b)]
    ranks: dict[int, Facts] = field(default_factory=dict)  # what collectives_job.run_ranks returned

    def fact(self, rank: int, part: str, default: Any = None) -> Any:
        """Return a part of a node's facts, or the default if the node has not sent it or does not know it."""
        value = self.facts.get(rank, {}).get(part)
        return default if value is None else value

    def fabric(self, rank: int) -> str:
        """Return a node's FABRIC: of site.env, which fabric.sh reads, or of the environment."""
        variables = {**self.fact(rank, "variables", {}), **self.ranks.get(rank, {}).get("fabric", {})}
        return variables.get("FABRIC") or "auto"

    def may_use_rdma(self, rank: int) -> bool:
        """Return whether a node's job may use RDMA: not over TCP, also where FABRIC=auto is TCP by fabric.sh."""
        fabric = self.fabric(rank)
        is_disabled = self.ranks.get(rank, {}).get("fabric", {}).get("NCCL_IB_DISABLE") == "1"
        return fabric != "tcp" and not (fabric == "auto" and is_disabled)

    def name(self, rank: int) -> str:
        """Return a node's name for the report."""
        host = self.fact(rank, "host")
        return f"node {rank} ({host})" if host else f"node {rank}"

    def names(self, ranks: Sequence[int]) -> str:
        """Return the names of up to four nodes, and the number of others."""
        text = ", ".join(self.name(rank) for rank in list(ranks)[:4])
        return f"{text} and {len(ranks) - 4} more" if len(ranks) > 4 else text

    def each(self, part: str) -> Iterator[tuple[int, Any]]:
        """Yield each node's rank and its value of a part of the facts, if it has one."""
        for rank in sorted(self.facts):
            if (value := self.fact(rank, part)) is not None:
                yield rank, value

    def each_gpu(self) -> Iterator[tuple[int, str, Facts]]:
        """Yield the node, the name in findings and the fields of each GPU that nvidia-smi lists."""
        for rank, gpus in self.each("gpus"):
            for gpu in gpus:
                yield rank, f"GPU {gpu.get('index')} ({gpu.get('name')})", gpu

    def each_rank(self) -> Iterator[tuple[int, Facts]]:
        """Yield the node and the notes of each rank of the doctor's own job."""
        for node, found in sorted(self.ranks.items()):
            for notes in found["ranks"]:
                yield node, notes

    def each_pair(self) -> Iterator[tuple[int, int, Facts]]:
        """Yield each node, another node, and what the first sees of the other."""
        for viewer, seen in sorted(self.peers.items()):
            for other, found in sorted(seen.items(), key=lambda item: int(item[0])):
                yield viewer, int(other), found

    def machine(self, rank: int) -> str:
        """Return an identifier of a node's machine; a unique one for a node that has sent none."""
        return str(self.fact(rank, "machine", f"node {rank}"))

    def network(self, rank: int) -> Facts:
        """Return a node's network facts, or question marks if the node does not know them."""
        unknown = {**dict.fromkeys(("address", "interface", "mtu"), "?"), "addresses": []}
        return self.fact(rank, "network", unknown)

    def probed(self) -> list[int]:
        """Return the nodes whose files in the runs folder all nodes look for, evenly spaced."""
        writers = [rank for rank, written in self.written.items() if not written.get("error")]
        return writers[:: max(1, -(-len(writers) // PROBED))]

    def runs_dir(self, rank: int) -> str:
        """Return the path of a node's runs folder."""
        return str(self.fact(rank, "disk", {}).get("runs", "the runs folder"))

    def error(self, nodes: int | Sequence[int], what: str, remedy: str, severity: str = "error") -> Finding:
        """Return an error of one node, whose name is put in front, or of several nodes."""
        if isinstance(nodes, int):
            return Finding(severity, (nodes,), f"{self.name(nodes)}: {what}", remedy)
        return Finding(severity, tuple(nodes), what, remedy)

    def warning(self, nodes: int | Sequence[int], what: str, remedy: str) -> Finding:
        """Return a warning."""
        return self.error(nodes, what, remedy, "warning")


Findings = Iterator[Finding]
