"""The grid of options of a sweep: every combination of the values, in the order in which they are written.

    scripts/dev/python.sh -m slurm.sweep "lr=0.1,0.2 seed=1,2"      the number of points: 4
    scripts/dev/python.sh -m slurm.sweep "lr=0.1,0.2 seed=1,2" 2    point 2, an argument a line: --lr 0.2 --seed 1

slurm/array.sbatch reads its task's point from it, and slurm/submit.py all points. It needs no packages.
"""

from __future__ import annotations

import itertools
import re
import sys

from recipes.common.errors import UserError
from recipes.common.process.entry import exit_status

USAGE = 'usage: scripts/dev/python.sh -m slurm.sweep "lr=0.1,0.2 seed=1,2" [POINT]'


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


def words(point: dict[str, str]) -> list[str]:
    """Return a point as command-line arguments: ["--lr", "0.1", "--seed", "1"]."""
    return [word for name, value in point.items() for word in (f"--{name}", value)]


def main() -> None:
    """Print the number of points, or the arguments of one point."""
    if len(sys.argv) not in (2, 3):
        raise UserError(USAGE)
    points = grid_points(sys.argv[1])
    if len(sys.argv) == 2:
        print(len(points))
        return
    number = sys.argv[2]
    if not (number.isascii() and number.isdigit()) or int(number) >= len(points):
        raise UserError(f"the points of {sys.argv[1]!r} count from 0 to {len(points) - 1}, got {number!r}")
    print("\n".join(words(points[int(number)])))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
