"""Which ranks are slow, by the notes of all: each says how long it has worked outside of collectives."""

from __future__ import annotations

import statistics
from typing import Any

Work = dict[int, dict[str, Any]]
"""The notes of ranks, by rank."""

LEAST_EXCESS_S = 0.005
"""What a straggler takes longer for a step, at the least: less is not worth a line."""


def stragglers(before: Work, after: Work, seconds: float, share: float) -> list[str]:
    """Return a sentence for each rank that all others wait for.

    Args:
        before: notes of the ranks at the beginning of a window.
        after: and at its end; a rank that is in only one of them does not count.
        seconds: the window.
        share: of a step's time, by which a rank's own work exceeds the median of the others' to be named.
    """
    work_s = {}
    for rank in before.keys() & after.keys():
        steps = (after[rank]["step"] or 0) - (before[rank]["step"] or 0)
        if steps >= 5:
            work_s[rank] = (after[rank]["busy_s"] - before[rank]["busy_s"]) / steps
            step_s = seconds / steps  # the same for all: they go in step
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
