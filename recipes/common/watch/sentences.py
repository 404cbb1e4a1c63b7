"""What a hang's report says, by the notes of the ranks: see Watch._note()."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

MOST_NAMED = 8
"""Up to this many ranks are named one by one."""


def summarize(found: dict[int, dict[str, Any]], last: dict[int, dict[str, Any]], world_size: int) -> str:
    """Return one sentence that says which ranks wait, and for which ranks.

    Args:
        found: the notes of the ranks that answered, by rank.
        last: the last known notes of the ranks that did not, by rank; some may be missing.
        world_size: the number of ranks.
    """
    silent = sorted(set(range(world_size)) - set(found))
    outside = sorted(rank for rank, note in found.items() if not note["is_inside"])
    waits = _waits([note for note in found.values() if note["is_inside"]])
    if silent:
        hosts = ", ".join(sorted({str(last[rank]["host"]) for rank in silent if rank in last}))
        verb = "does" if len(silent) == 1 else "do"
        place = last_place(last.get(silent[0]))
        return f"{name_ranks(silent)}{hosts and ' on '}{hosts} {verb} not answer, {place}; {waits}"
    if outside:
        verb = "does" if len(outside) == 1 else "do"
        return f"{name_ranks(outside)} {verb} not come, {where_it_stands(found[outside[0]])}; {waits}"
    return f"all ranks answer, and all wait: {waits}; is a link between them down?"


def _waits(notes: Sequence[dict[str, Any]]) -> str:
    """Return which ranks wait in which collective; the first is the one that not all ranks have joined."""
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for note in notes:
        groups.setdefault((note["entered"], note["name"], _after(note)), []).append(note)
    texts = []
    for (_, name, after), members in sorted(groups.items()):
        waited_s = max(note["since_s"] for note in members)
        texts.append(
            f'{name_ranks(sorted(n["rank"] for n in members))} waited {waited_s:.0f} s in "{name}"{after}'
        )
    return ", ".join(texts) or "nobody waits"


def where_it_stands(note: dict[str, Any]) -> str:
    """Return a rank's position according to its note."""
    where = "waits in" if note["is_inside"] else "is past"
    on = f"rank {note['rank']} (pid {note['pid']} on {note['host']})"
    return f'{on} {where} "{note["name"]}"{_after(note)} for {note["since_s"]:.1f} s'


def last_place(note: dict[str, Any] | None) -> str:
    """Return the position of a rank that does not answer, according to its last note."""
    if not note:
        return "nobody knows where it was"
    ago_s = max(0.0, time.time() - note["time"])
    where = "in" if note["is_inside"] else "past"
    return f'last seen {ago_s:.1f} s ago {where} "{note["name"]}"{_after(note)}'


def _after(note: dict[str, Any]) -> str:
    return "" if note["step"] is None else f" after step {note['step']}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "ranks 0, 1, 2", or, for more than MOST_NAMED ranks, ranges: "ranks 0-16, 18-1023"."""
    if len(ranks) <= MOST_NAMED:
        return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return "ranks " + ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
