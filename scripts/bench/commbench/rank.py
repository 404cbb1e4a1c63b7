"""One rank of the communication benchmark, for one backend.

    mpirun -np 4 python -m scripts.bench.commbench.rank --backend mpi
    torchrun --nproc-per-node=2 -m scripts.bench.commbench.rank --backend gloo --sizes 64k,16m

Rank 0 prints the table, or writes its rows to --result, as scripts/bench/commbench/__main__.py asks for.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from recipes.common.arguments import one_of
from recipes.common.errors import UserError
from recipes.common.process.entry import run_main
from recipes.common.process.ranks import HAVE_MET
from recipes.common.watch.timeouts import time_limit
from scripts.bench.commbench.backends import Backend, connect
from scripts.bench.commbench.options import BACKENDS, add_options, check_options, parse_sizes
from scripts.bench.commbench.rows import COLUMNS, Row
from scripts.doctor.collectives import pattern
from scripts.launch.command import CommandParser, parse
from scripts.launch.mpirun import MPI_RANK, first_set
from scripts.launch.tables import table

WARM_UPS, FEWEST, MOST = 2, 3, 2000
"""Number of warm-up calls, and the minimum and maximum number of timed calls."""


def options(argv: Sequence[str]) -> Namespace:
    """Parse the options of a rank; raises UserError if one is invalid."""
    parser = CommandParser("python -m scripts.bench.commbench.rank", __doc__)
    parser.add_argument("--backend", type=one_of(*BACKENDS), required=True, help=f"one of {', '.join(BACKENDS)}")
    add_options(parser)
    parser.add_argument("--result", type=Path, metavar="FILE", help="where rank 0 writes its rows")
    args = parse(parser, argv)
    check_options(args)
    return args


class WrongResultError(UserError):
    """An incorrect result. Not the user's mistake, but a UserError: all ranks raise it, and it prints one line."""

    status = 1


def exit_if_stuck(what: str, timeout_s: float) -> contextlib.AbstractContextManager[None]:
    """End this process if the block takes too long: MPI and Horovod would wait for a lost rank forever."""

    def give_up() -> None:
        message = f"{what} took longer than {timeout_s:.0f} s (see --timeout-s): a rank does not answer"
        os.write(2, f"error: {message}\n".encode())
        os._exit(1)

    return time_limit(timeout_s, give_up)


def check(world: Backend, op: str, numel: int) -> None:
    """Raise WrongResultError if a result is incorrect on any rank; call it on all ranks."""
    given = pattern(numel, world.device)
    own = given * (world.rank + 1)
    if op == "all-gather":
        result = world.all_gather(own)
        wanted = torch.cat([given * (rank + 1) for rank in range(world.size)])
    elif op == "all-reduce":
        world.all_reduce(own)
        result, wanted = own, given * (world.size * (world.size + 1) // 2)
    else:
        world.broadcast(own)
        result, wanted = own, given
    wrong = int((result != wanted).sum())
    worst = world.largest(wrong)
    if worst:
        raise WrongResultError(f"{op} of {numel * 4} bytes: {worst:.0f} elements of a rank are wrong")


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes, the wait for the GPU included."""
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(world: Backend, op: str, size: int, seconds: float, timeout_s: float) -> tuple[int, float, int]:
    """Return the result's bytes, the seconds per call and the number of timed calls; call it on all ranks.

    The seconds are the median over the calls, of the slowest rank. `timeout_s` bounds the wait in each call.
    """
    parts = world.size if op == "all-gather" else 1
    numel = max(1, size // (4 * parts))
    what = f"{op} of {size} bytes"
    with exit_if_stuck(what, timeout_s):
        check(world, op, numel)
    data = torch.zeros(numel, device=world.device)  # zeros: repeated sums cannot overflow
    call = {"all-reduce": world.all_reduce, "broadcast": world.broadcast, "all-gather": world.all_gather}[op]
    with exit_if_stuck(what, WARM_UPS * timeout_s):
        once = world.largest(min(timed(lambda: call(data), world.device) for _ in range(WARM_UPS)))
    # All ranks have to make the same number of calls.
    count = int(min(MOST, max(FEWEST, seconds / max(once, 1e-7))))
    with exit_if_stuck(what, timeout_s + 2 * count * once):
        times = [timed(lambda: call(data), world.device) for _ in range(count)]
        return numel * 4 * parts, world.largest(median(times)), count


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every operation and size; call it on every rank."""
    # Only rank 0 prints a UserError (recipes/common/process/entry.py), but not every launcher sets RANK.
    rank = first_set(("RANK", "HOROVOD_RANK", *MPI_RANK), 0)
    has_ranks = "RANK" in os.environ
    os.environ["RANK"] = str(rank)
    args = options(sys.argv[1:] if argv is None else argv)
    if args.backend in ("gloo", "nccl") and not has_ranks:
        raise UserError("RANK is not set: a launcher sets it; use make commbench, or start this by torchrun")
    torch.set_num_threads(1)
    with exit_if_stuck("meeting the others", args.timeout_s):
        world = connect(args.backend, args.timeout_s)
    os.environ["RANK"] = str(world.rank)
    HAVE_MET.set()
    rows = []
    for op in args.ops.split(","):
        for size in parse_sizes(args.sizes):
            result_bytes, latency_s, calls = measure(world, op, size, args.seconds, args.timeout_s)
            row = (args.backend, op, result_bytes, world.size, world.device.type, 1e6 * latency_s, calls)
            rows.append(Row(*row))
    with exit_if_stuck("leaving", args.timeout_s):
        world.leave()
    if world.rank == 0:
        if args.result:
            args.result.write_text(json.dumps([asdict(row) for row in rows]))
        else:
            print(table(COLUMNS, [row.as_dict(args.link_gbit) for row in rows], left=2), flush=True)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
