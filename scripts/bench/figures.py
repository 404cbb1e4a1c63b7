"""What a benchmark measures: figures with their goals, from rounds in which the contenders take turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from scripts.launch.tables import markdown_table

PARTS = {
    **dict.fromkeys(("small-data", "jpeg", "remote", "step"), 3),
    "scaling": 2,
    **dict.fromkeys(("wire", "launch"), 3),
    "checkpoint": 5,
    **dict.fromkeys(("gpu", "plan"), 1),
}
"""The parts and the maximum rounds of each. A part is a module with `measure(rounds, folder) -> list[Figure]`.

The one round of gpu should take less than ten minutes (estimated; it has not run on a GPU yet). Stopped earlier,
by TERM or Ctrl-C, it keeps the figures so far; the most telling ones come first.
"""

TITLES = ("figure", "goal", "measured", "min .. max", "met", "against", "note")
NOT_MEASURED = "not measured in this run"


@dataclass(frozen=True)
class Figure:
    """A measured figure, usually the ratio of two contenders: the median over the rounds."""

    name: str  # what was measured, in words
    measured: float | None  # None if it could not be measured; the note says why
    low: float | None = None  # minimum over the rounds
    high: float | None = None  # maximum over the rounds
    goal: str = ""  # ">= 1.8" or "<= 1.05"; empty: reported without a goal
    peer: str = ""  # what it was measured against
    note: str = ""  # the figures behind a ratio, with their units
    is_limit: bool = False
    """Whether the peer is the limit, the most that the machine allows; it applies to all figures of this name."""
    no_limit: str = ""  # why there is no limit
    part: str = ""  # the part of the benchmark, as PARTS names it; who runs the part fills it in

    @property
    def values(self) -> tuple[float, float, float]:
        """The measured value, with its minimum and maximum."""
        assert self.measured is not None
        low, high = (self.measured if value is None else value for value in (self.low, self.high))
        return self.measured, low, high

    @property
    def share(self) -> tuple[float, float, float]:
        """The speed relative to the peer's, with minimum and maximum; a goal of "<=" marks a ratio of times."""
        middle, low, high = self.values
        return (1 / middle, 1 / high, 1 / low) if self.goal.startswith("<=") else self.values

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None if there is no goal or no measurement."""
        if not self.goal or self.measured is None:
            return None
        sign, value = self.goal.split()
        return self.measured >= float(value) if sign == ">=" else self.measured <= float(value)

    def cells(self) -> list[str]:
        """Return the figure's cells in a table with the columns of TITLES."""
        between = f"{number(self.low)} .. {number(self.high)}" if self.low is not None else "-"
        met = {True: "yes", False: "no", None: ""}[self.is_met]
        peer = f"**limit:** {self.peer}" if self.is_limit else self.peer
        note = f"{self.note}; no limit: {self.no_limit}".removeprefix("; ") if self.no_limit else self.note
        cells = [self.name, self.goal, number(self.measured), between, met, peer, note]
        return [cell or "-" for cell in cells]

    def as_dict(self) -> dict[str, Any]:
        """Return the figure as in the JSON file."""
        return {"part": self.part, **asdict(self), "is_met": self.is_met}


Rounds = dict[str, list[float]]
"""For each contender, its value in each round."""


def turns(contenders: Mapping[str, Callable[[], float]], rounds: int) -> Iterator[tuple[str, list[float]]]:
    """Call every contender once per round; yield after each call its name and its values so far.

    The order rotates by one each round, so that noise of the machine affects all of them alike.
    """
    names = list(contenders)
    values: Rounds = {name: [] for name in names}
    for i in range(rounds if names else 0):
        for name in [*names[i % len(names) :], *names[: i % len(names)]]:
            values[name].append(contenders[name]())
            yield name, values[name]


def take_turns(contenders: Mapping[str, Callable[[], float]], rounds: int, warm_up: bool = False) -> Rounds:
    """Return the values of contenders that take turns in each round.

    With warm_up, each one is first called once without being measured: use it for contenders that do not warm up
    by themselves.
    """
    for name in contenders if warm_up else ():
        contenders[name]()
    return dict(turns(contenders, rounds))


def median_and_range(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the minimum and the maximum."""
    return median(values), min(values), max(values)


def ratio(values: Rounds, name: str, against: str) -> tuple[float, float, float]:
    """Return the median, minimum and maximum of the ratios of two contenders in the same round."""
    return median_and_range([a / b for a, b in zip(values[name], values[against], strict=True)])


def speed_figure(
    name: str,
    values: Rounds,
    ours: str,
    against: str,
    goal: str,
    peer: str,
    unit: str = "samples/s",
    is_limit: bool = False,
) -> Figure:
    """Return a figure for the ratio of two contenders' speeds; the note has their medians."""
    note = f"{median(values[ours]):,.0f} against {median(values[against]):,.0f} {unit}"
    return Figure(name, *ratio(values, ours, against), goal, peer, note, is_limit)


def unmeasured(name: str, reason: str, goal: str = "") -> Figure:
    """Return a figure without a measurement, with the reason why it cannot be measured here."""
    return Figure(name, None, goal=goal, note=f"not measured: {reason}")


def process_count_text(processes: int) -> str:
    """Return the number of processes in words."""
    return f"{processes} process{'es' if processes > 1 else ''}"


def table_lines(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table whose columns are not aligned; an empty cell becomes "-"."""
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    escaped = ([text.replace("|", "\\|").replace("\n", " ") or "-" for text in row] for row in rows)
    return [*lines, *(f"| {' | '.join(cells)} |" for cells in escaped)]


def describe_machine(hardware: Mapping[str, Any]) -> str:
    """Describe a machine in words: cores, memory and GPUs."""
    gpus = hardware["gpus"]
    what = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    return f"{hardware['cpus']} cores of {hardware['cpu']}, {hardware['memory_gb']} GB, {what}"


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as an aligned Markdown table: the part, then the columns of TITLES."""
    rows = [["part", *TITLES]]
    rows += [[figure.part, *figure.cells()] for figure in figures]
    return markdown_table(rows, left=8)


def number(value: float | None) -> str:
    """Format a value with at least three significant digits; None becomes "-"."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
