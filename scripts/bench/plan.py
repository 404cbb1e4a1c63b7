"""The plan held to real runs: its step time, and its bytes, on nodes of this machine with limited links."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from scripts.bench.figures import Figure, spread, unmeasured
from scripts.bench.programs import in_namespaces
from scripts.plan.check import error_of, network

MOST_ROUNDS = 3
"""A round takes four minutes."""

STEP_GOAL, BYTES_GOAL = "<= 1.15", "<= 1.02"


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Return a figure for the step time of each point, and one for the bytes of all."""
    if reason := network.why_not():
        return [unmeasured("plan", "predicted step time", reason, STEP_GOAL)]
    points = in_namespaces("scripts.plan.check", min(rounds, MOST_ROUNDS), folder / "points.json")
    figures = []
    for point in points:
        ratios = [max(1 + error, 1 / (1 + error)) for error in error_of(point)]
        predicted, real = (1e3 * median(one["step_s"] for one in point[kind]) for kind in ("predicted", "real"))
        rate = f" at {point['mbit']:g} Mbit/s" if point["nodes"] > 1 else ""
        name = f"predicted step time, {point['nodes']} node{'s' if point['nodes'] > 1 else ''}{rate}"
        note = f"predicted {predicted:.0f} ms, real {real:.0f} ms; the larger over the smaller"
        figures.append(Figure("plan", name, *spread(ratios), STEP_GOAL, "ddp", note))
    sent = [1 / (1 + error) for point in points if point["nodes"] > 1 for error in error_of(point, "sent_bytes")]
    note = "of all points; the votes on stopping are in it"
    return [*figures, Figure("plan", "bytes sent over the plan's", *spread(sent), BYTES_GOAL, "ddp", note)]
