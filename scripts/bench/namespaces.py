"""Measure a part of make bench whose nodes have a network each, in namespaces of its own, as root on Linux.

    make plan CHECK=1
    python -m scripts.bench.namespaces wire --rounds 1

Prints the figures, or writes them to --result.
Exit status 0 whatever the figures are; 1: a run failed; 2: bad usage, or this machine cannot have such networks.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from recipes.common.arguments import one_of
from recipes.common.errors import UserError
from scripts.bench.figures import Figure, table, unmeasured
from scripts.lab import network
from scripts.launch.command import ROOT, CommandParser, command, count, parse
from scripts.launch.processes import run_in_foreground

MODULE = "scripts.bench.namespaces"
PARTS = ("scaling", "wire", "plan")


def measure_here(part: str, rounds: int) -> Iterator[Figure]:
    """Measure a part of make bench in this process and a temporary folder."""
    module = importlib.import_module(f"scripts.bench.{part.replace('-', '_')}")
    with tempfile.TemporaryDirectory(prefix=f"bench-{part}-") as folder:
        for figure in module.measure(rounds, Path(folder)):
            yield replace(figure, part=part)


def measure(part: str, rounds: int) -> Iterator[Figure]:
    """Yield a part's figures as they are measured; those of PARTS by a process of its own, or as unmeasured.

    Raises RuntimeError if that process failed; it has printed why.
    """
    if part not in PARTS:
        yield from measure_here(part, rounds)
        return
    if reason := network.why_not(narrow=True):
        yield replace(unmeasured("nodes with a network each", reason), part=part)
        return
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        words = [part, "--rounds", str(rounds), "--result", result.name]
        # By TERM: at SIGINT alone, it would wait for what is inside, which has not got it.
        if status := run_in_foreground([sys.executable, "-m", MODULE, *words], signal.SIGTERM, cwd=ROOT):
            raise RuntimeError(f"ended with status {status}")
        yield from (Figure(**row) for row in json.load(result))


@command
def main(argv: list[str]) -> int:
    """Measure a part in new namespaces of this process; return 1 if it fails."""
    parser = CommandParser(f"python -m {MODULE}", __doc__)
    parser.add_argument("part", type=one_of(*PARTS), metavar="PART", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=count, default=3, help="medians are over them (3)")
    parser.add_argument("--result", type=Path, metavar="FILE", help="where the figures go, as JSON")
    args = parse(parser, argv)
    if reason := network.why_not(narrow=True):
        raise UserError(f"{args.part} cannot be measured here: {reason}")
    network.enter(MODULE, argv)
    try:
        figures = list(measure_here(args.part, args.rounds))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.result:
        args.result.write_text(json.dumps([vars(figure) for figure in figures]))
    else:
        print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
