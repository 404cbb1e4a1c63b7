"""make commbench: right sums, every line measured, and one line where it cannot be."""

import json
import sys
import types

import pytest
import torch

from recipes.common.errors import UserError
from scripts.bench.commbench import rank
from tests.conftest import need_horovod, need_mpi
from tests.support import run_command

pytestmark = pytest.mark.slow

SMALL = ("--sizes", "4,12k", "--seconds", "0.01", "--link-gbit", "10")


def measure(folder, nodes, *words):
    """Run it; return its report."""
    result = run_command(
        sys.executable,
        "-m",
        "scripts.bench.commbench",
        *words,
        "--nodes",
        str(nodes),
        "--runs-dir",
        str(folder),
        *SMALL,
    )
    assert result.status == 0, result.stdout + result.stderr
    report = json.loads((folder / "commbench-001/commbench.json").read_text())
    assert len(result.stdout.splitlines()) == len(report["rows"]) + 3  # header, rule, last line
    return report


@pytest.mark.parametrize("backend", ["gloo", "mpi", "horovod"])
def test_every_line_is_measured(backend, tmp_path):
    if backend == "mpi":
        need_mpi()
    if backend == "horovod":
        need_horovod()
    report = measure(tmp_path, 3 if backend == "gloo" else 2, backend)
    assert report["failed"] == {}
    ranks = 3 if backend == "gloo" else 2
    wanted = [(op, size) for op in ("all-reduce", "broadcast", "all-gather") for size in (4, 12 * 1024)]
    # An all-gather's result has a part of each rank's: at least one number.
    wanted[4] = ("all-gather", 4 * ranks)
    assert [(row["op"], row["bytes"]) for row in report["rows"]] == wanted
    for row in report["rows"]:
        assert (row["backend"], row["ranks"]) == (backend, ranks)
        assert row["calls"] >= 3
        assert row["algorithm_gb_s"] == pytest.approx(row["bytes"] / row["latency_us"] / 1e3)
        assert row["link_share"] == pytest.approx(row["bus_gb_s"] * 8 / 10)


class Liar:
    """A backend of one rank, with a bit that flips."""

    rank, size, device = 0, 1, torch.device("cpu")

    def all_reduce(self, tensor):
        return tensor.index_fill(0, torch.tensor([2]), 7.5)

    def largest(self, value):
        return value


def test_a_wrong_sum_is_found():
    with pytest.raises(rank.WrongResultError, match="all-reduce of 20 bytes: 1 elements of a rank are wrong"):
        rank.check(Liar(), "all-reduce", 5)


def test_a_rank_without_a_launcher_says_so(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(rank, "os", types.SimpleNamespace(environ={}))
    with pytest.raises(UserError, match="RANK is not set: a launcher sets it"):
        rank.main(["--backend", "gloo"])
