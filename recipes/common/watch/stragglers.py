"""Which ranks are slow, by the notes of all: each says how long it has worked outside of collectives."""

from __future__ import annotations

import statistics
from typing import Any

Work = dict[int, dict[str, Any]]
"""The notes of ranks, by rank."""

LEAST_EXCESS_S = 0.005
"""A straggler's work takes at least this much longer per step: less is not worth a warning."""


def stragglers(before: Work, after: Work, seconds: float, share: float) -> list[str]:
    """Return a sentence for each rank that all others wait for.

    Args:
        before: the ranks' notes at the beginning of a window.
        after: their notes at its end; ranks that are missing from either or made fewer than 5 steps are ignored.
        seconds: the length of the window.
        share: a rank is named if its own work exceeds the median of the others' by this share of a step's time.
    """
    work_s = {}
    for rank in before.keys() & after.keys():
        steps = (after[rank]["step"] or 0) - (before[rank]["step"] or 0)
        if steps >= 5:
            work_s[rank] = (after[rank]["busy_s"] - before[rank]["busy_s"]) / steps
            step_s = seconds / steps  # the same for all ranks: they step together
    if len(work_s) < 2:
        return []
    found = []
    ordered = sorted(work_s.values())
    for rank in sorted(work_s):
        place = ordered.index(work_s[rank])
        others_s = statistics.median(ordered[:place] + ordered[place + 1 :])
        if work_s[rank] - others_s > max(share * step_s, LEAST_EXCESS_S):
            found.append(
                f"rank {rank} on {after[rank]['host']} is slow: of a step of {1000 * step_s:.0f} ms, "
                f"its own work takes {1000 * work_s[rank]:.0f} ms, the work of the others {1000 * others_s:.0f} ms"
            )
    return found
