"""What the doctor prints on node 0, and the JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.common.folders import replace_text
from scripts.doctor.case import Case, Finding
from scripts.doctor.rules import links, tally

MOST_ROWS = 64
"""Most rows of the map of ranks that are printed: they are a line of some 150 bytes each."""


def count(number: int, what: str) -> str:
    """Return "1 node" or "2 nodes", and "" for none."""
    return f"{number} {what}{'s' if number != 1 else ''}" if number else ""


def node_line(case: Case, rank: int) -> str:
    """Return a line that describes a node."""
    facts = case.facts[rank]
    parts = [f"{facts['cores']} cores"]
    if network := facts.get("network"):
        parts.insert(0, f"{network['address']} by {network['interface']} (mtu {network['mtu']})")
    if disk := facts.get("disk"):
        parts.append(f"/dev/shm {(disk['shm_bytes'] or 0) / 2**30:.1f} GiB")
    parts.append("RDMA " + (", ".join(facts.get("rdma") or []) or "none"))
    torch, listed = facts.get("torch") or {}, facts.get("gpus") or []
    names = [device["name"] for device in torch.get("devices", []) if device["device"] != "cpu"]
    names = names or [gpu["name"] for gpu in listed]
    parts.append(f"{len(names)} x {names[0]}" if names else "no GPU")
    if "version" in torch:
        parts.append(f"torch {torch['version']}" + (f", NCCL {torch['nccl']}" if torch["nccl"] else ""))
    if listed:
        parts.append(f"driver {listed[0]['driver_version']}")
    parts.append(f"revision {(facts.get('revision') or 'unknown')[:12]}")
    return f"{case.name(rank)}: " + ", ".join(parts)


def lines(case: Case, findings: list[Finding], seconds: float) -> list[str]:
    """Return the lines of the report: nodes, links, networks, the map of ranks, findings, and the verdict last."""
    text = [node_line(case, rank) for rank in sorted(case.facts)]
    measured = links(case)
    for (a, b), speed in sorted(measured.items())[:28]:
        text.append(f"{case.name(a)} - {case.name(b)}: {speed:.2f} Gbit/s each way")
    if len(measured) > 28:
        slowest = min(measured, key=lambda pair: measured[pair])
        text.append(f"... {len(measured)} links in all, the slowest {measured[slowest]:.2f} Gbit/s: {slowest}")
    text += networks(case)
    if probe := probe_map(case):
        if len(probe["ranks"]) > MOST_ROWS:
            probe = {**probe, "ranks": f"{len(probe['ranks'])} rows, which --json writes to its file"}
        text.append(f"probe {json.dumps(probe)}")
    text += [str(finding) for finding in findings]
    counts, on = tally(findings), f" on {count(case.nnodes, 'node')}"
    errors, warnings = (count(counts[severity], severity) for severity in ("error", "warning"))
    what = ", ".join(filter(None, [errors or f"all is well{on}", warnings])) + (on if errors else "")
    return [*text, f"doctor: {what}, {seconds:.0f} s"]


def networks(case: Case) -> list[str]:
    """Return a line for each network that NCCL reports, with the nodes that use it; none on CPUs."""
    found: dict[str, set[int]] = {}
    for node, rank in case.each_rank():
        if network := rank.get("network"):
            found.setdefault(network, set()).add(node)
    return [f"NCCL uses {network} on {case.names(sorted(nodes))}" for network, nodes in sorted(found.items())]


def probe_map(case: Case) -> dict[str, Any] | None:
    """Return the map of ranks as recipes/probe prints it, or None."""
    maps = [rank["map"] for _, rank in case.each_rank() if rank.get("map")]
    return max(maps, key=lambda one: len(one["ranks"]), default=None)  # rank 0 has the rows, unless it was lost


def write_json(path: Path, case: Case, findings: list[Finding], seconds: float) -> None:
    """Write the full report; raises OSError."""
    content = {
        "ok": not tally(findings)["error"],
        "nnodes": case.nnodes,
        "master": case.master,
        "seconds": round(seconds, 1),
        "findings": [asdict(finding) for finding in findings],
        "links_gbit_s": {f"{a}-{b}": speed for (a, b), speed in sorted(links(case).items())},
        "probe": probe_map(case),
        "clocks_s": {rank: round(offset, 6) for rank, (offset, _) in sorted(case.clocks.items())},
        "peers": case.peers,
        "nodes": case.facts,
    }
    replace_text(path, json.dumps(content, indent=2) + "\n")
