"""What the ranks of a run recorded (scripts/same/observe.py) and printed."""

from __future__ import annotations

import json
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from scripts.same.causes import Finding
from scripts.same.printed import Series, read_series

SKETCHES = ("weights", "final", "after")

Step = dict[str, Any]


@dataclass
class Run:
    """What the ranks of a run recorded and printed."""

    world_size: int
    statuses: Sequence[int | None]
    events: list[list[dict[str, Any]]]
    """For each rank, its recorded events."""
    series: dict[str, Series] = field(default_factory=dict)
    error: str = ""
    """The last line of a failed rank's standard error."""

    def of(self, event: str) -> list[list[dict[str, Any]]]:
        """Return each rank's events of one kind."""
        return [[line for line in lines if line["event"] == event] for lines in self.events]

    @cached_property
    def steps(self) -> list[list[Step]]:
        """The optimizer steps that every rank has done, each as the list of the ranks' records."""
        return [list(records) for records in zip(*self.of("step"), strict=False)]

    def rows(self, i: int) -> Counter[str]:
        """Return the samples that went into step i on all ranks."""
        return Counter(row for record in self.steps[i] for row in record["rows"])

    def batches(self, rank: int) -> dict[int, list[list[int]]]:
        """Return the training batches that a rank has drawn from its loaders, by loader iteration."""
        trained = {records[rank]["iteration"] for records in self.steps}
        found: dict[int, list[list[int]]] = {}
        for event in self.of("batch")[rank]:
            if event["iteration"] in trained:
                found.setdefault(event["iteration"], []).append(event["indices"])
        return found

    def joint_batches(self) -> dict[int, list[list[int]]]:
        """Return the training batches, joined over all ranks, by loader iteration of rank 0."""
        ranks = [self.batches(rank) for rank in range(len(self.events))]
        joint = {}
        # Ranks count differently if only one of them evaluates.
        for iteration, *parts in zip(ranks[0], *(own.values() for own in ranks), strict=False):
            joint[iteration] = [[*chain(*batch)] for batch in zip(*parts, strict=False)]
        return joint

    def share_batches(self, rank: int, step: int) -> dict[int, list[list[int]]]:
        """Return joint_batches(), but from a step on only those of one rank."""
        joint, shares, position = self.joint_batches(), self.batches(rank).values(), count()
        start = step * sum(map(len, joint.values())) // len(self.steps)
        return {
            iteration: [own if next(position) >= start else whole for whole, own in zip(*pair, strict=False)]
            for iteration, pair in zip(joint, zip(joint.values(), shares, strict=False), strict=False)
        }

    def failure(self) -> Finding | None:
        """Return why the run failed, or None if it succeeded."""
        if all(status == 0 for status in self.statuses):
            return None
        where = f"after step {len(self.steps)}"
        if "finished reduction in the prior iteration" in self.error:
            return Finding("unused-parameters", f"{where}: {self.error[:150]}")
        if None in self.statuses:
            return Finding("hung", where)
        return Finding("failed", f"{where}: {self.error[:300]}")


def load(folder: Path, world_size: int, statuses: Sequence[int | None], pattern: str = "") -> Run:
    """Return the run recorded in a folder; `pattern` finds the losses ("": those with the usual names)."""
    ranks = [folder / f"rank{rank}" for rank in range(world_size)]
    events = []
    for rank in ranks:
        whole, _, _ = read(rank.with_suffix(".jsonl")).rpartition("\n")  # a rank may have been killed
        events.append([parse_event(line) for line in whole.splitlines()])
    series: dict[str, Series] = {}
    for suffix in (".report", ".out", ".err"):
        if pattern and series and suffix == ".err":  # the module logging writes there, but so do warnings
            break
        texts = (read(rank.with_suffix(suffix)) for rank in ranks)
        found = (read_series(text, pattern, is_report=suffix == ".report") for text in texts)
        series = next(filter(None, found), {}) | series
    return Run(world_size, statuses, [lines for lines in events if lines] or [[]], series, read_error(folder))


def read_error(folder: Path) -> str:
    """Return the line of standard error that says best why a run failed, or "" if nothing was written."""
    paths = [*sorted(folder.glob("rank*.err")), folder / "launcher.err"]
    errors = [text for path in paths if (text := read(path).strip())]
    said = [line for text in errors for line in text.splitlines() if "RuntimeError: Expected to have" in line]
    ends = [text.splitlines()[-1] + source_location(text) for text in errors]
    return next(iter([*said, *(line for line in ends if "Connection" not in line), *ends]), "")


def source_location(traceback: str) -> str:
    """Return the file and line of the user's code in which a traceback ends, " (train.py:12)", or ""."""
    frames = re.findall(r'^ *File "([^"<]+)", line (\d+)', traceback, re.MULTILINE)
    others = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parent))
    own = [f" ({Path(path).name}:{line})" for path, line in frames if not path.startswith(others)]
    return "".join(own[-1:])


def read(path: Path) -> str:
    """Return the text of a file, or "" if it does not exist."""
    return path.read_text(errors="replace") if path.exists() else ""


def parse_event(line: str) -> dict[str, Any]:
    """Return an event, with its sketches as arrays of shape (61,)."""
    event: dict[str, Any] = json.loads(line)
    return event | {name: np.array(event[name]) for name in SKETCHES if event.get(name)}
