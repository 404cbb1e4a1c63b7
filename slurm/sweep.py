"""The grid of options of a sweep: every combination of the values, in the order in which they are written.

    scripts/dev/python.sh -m slurm.sweep "lr=0.1,0.2 seed=1,2"      the number of points: 4
    scripts/dev/python.sh -m slurm.sweep "lr=0.1,0.2 seed=1,2" 2    point 2, an argument a line: --lr 0.2 --seed 1

slurm/job.sh reads the point of an array's task from it. slurm/submit.py reads all points, and prints their results
as a table. It needs no packages.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from recipes.common.errors import UserError
from scripts.launch.command import command
from scripts.launch.tables import markdown_table
from slurm.training import Run


def grid_points(text: str) -> list[dict[str, str]]:
    """Return the points of a sweep, the last option varying fastest: "lr=1,2" is {"lr": "1"} and {"lr": "2"}.

    Raises:
        UserError: no options, a word without "=", an invalid name, an empty value, or a duplicate name or value.
    """
    grid: dict[str, list[str]] = {}
    for word in text.split():
        name, equals, values = word.partition("=")
        if not equals:
            raise UserError(f"SWEEP expects options such as lr=0.1,0.2, got {word!r}")
        name = name.removeprefix("--").replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise UserError(f"SWEEP expects an option's name before '=', got {word!r}")
        if name in grid:
            raise UserError(f"SWEEP has {name} twice; put all its values in one list: {name}=...,...")
        grid[name] = values.split(",")
        if "" in grid[name]:
            raise UserError(f"SWEEP has an empty value in {word!r}")
        if len(set(grid[name])) < len(grid[name]):
            raise UserError(f"SWEEP has a value twice in {word!r}")
    if not grid:
        raise UserError('SWEEP is empty; give options and their values: "lr=0.1,0.2 seed=1,2"')
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def point_argv(point: dict[str, str]) -> list[str]:
    """Return a point as command-line arguments: ["--lr", "0.1", "--seed", "1"]."""
    return [word for name, value in point.items() for word in (f"--{name}", value)]


def read_result(run: Run, status: int) -> dict[str, Any]:
    """Return a run's result.json, of a script only the numbers in it; nothing if the run failed or wrote none."""
    path = run.folder / "result.json"
    if status or not path.is_file():
        return {}
    if not run.script:
        return dict(json.loads(path.read_text()))
    with contextlib.suppress(ValueError, AttributeError):  # a script's file may be anything
        return {name: x for name, x in json.loads(path.read_text()).items() if isinstance(x, int | float)}
    return {}


def cell(name: str, value: float | None) -> str:
    """Return a figure as text, with as many decimals in all rows, or a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    if name.endswith("_per_s"):
        return f"{value:,.0f}"
    return f"{value:.3e}" if 0 < abs(value) < 0.001 else f"{value:.4f}"


def report(runs: Sequence[Run], statuses: Sequence[int]) -> None:
    """Print the results of a sweep as a table, with the headline figure of each task, such as its accuracy."""
    results = [read_result(run, status) for run, status in zip(runs, statuses, strict=True)]
    if runs[0].script:
        columns = list(dict.fromkeys(itertools.chain(*results)))
    else:
        headlines = dict.fromkeys(result["headline"] for result in results if result) or ("test_accuracy",)
        columns = ["world_size", *headlines, "samples_per_s"]
    rows = [["run", *runs[0].point, *columns]]
    for run, result in zip(runs, results, strict=True):
        rows.append([run.folder.name, *run.point.values(), *(cell(name, result.get(name)) for name in columns)])
    print(markdown_table(rows), flush=True)


@command
def main(argv: list[str]) -> None:
    """Print the number of points, or the arguments of one point."""
    match argv:
        case [grid]:
            print(len(grid_points(grid)))
        case [grid, number]:
            points = grid_points(grid)
            if not (number.isascii() and number.isdigit()) or int(number) >= len(points):
                raise UserError(f"the points of {grid!r} count from 0 to {len(points) - 1}, got {number!r}")
            print("\n".join(point_argv(points[int(number)])))
        case _:
            raise UserError('usage: scripts/dev/python.sh -m slurm.sweep "lr=0.1,0.2 seed=1,2" [POINT]')


if __name__ == "__main__":
    sys.exit(main())
