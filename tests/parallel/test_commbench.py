"""make commbench: right sums, every line measured, and one line where it cannot be."""

import json
import signal
import sys
import types
from unittest.mock import Mock

import pytest
import torch

from recipes.common.errors import UserError
from scripts.bench.commbench import __main__ as commbench
from scripts.bench.commbench import rank
from scripts.launch.local import free_port
from tests.conftest import need_horovod, need_mpi
from tests.support import Command, run_command

pytestmark = pytest.mark.slow

SMALL = ("--sizes", "4,12k", "--seconds", "0.01", "--link-gbit", "10")


def measure(folder, nodes, *words):
    """Run commbench; return its report."""
    words = (*words, "--nodes", str(nodes), "--runs-dir", str(folder), *SMALL)
    result = run_command(sys.executable, "-m", "scripts.bench.commbench", *words, check=True)
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
    # An all-gather's result has a part from each rank, which is at least one number.
    wanted[4] = ("all-gather", 4 * ranks)
    assert [(row["op"], row["bytes"]) for row in report["rows"]] == wanted
    for row in report["rows"]:
        assert (row["backend"], row["ranks"]) == (backend, ranks)
        assert row["calls"] >= 3
        assert row["algorithm_gb_s"] == pytest.approx(row["bytes"] / row["latency_us"] / 1e3)
        assert row["link_share"] == pytest.approx(row["bus_gb_s"] * 8 / 10)


def test_each_node_of_a_cluster_starts_its_own_ranks(tmp_path):
    """Two nodes on this machine, started as srun would; node 0 alone prints the measurements."""
    common = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("-m", "scripts.bench.commbench", "gloo", "--runs-dir", str(tmp_path), *SMALL)
    nodes = [Command(sys.executable, *words, **common, NODE_RANK=str(number)) for number in range(2)]
    first, second = [node.wait(120) for node in nodes]
    assert first.status == second.status == 0, first.stderr + second.stderr
    assert second.stdout == ""
    rows = json.loads((tmp_path / "commbench-001/commbench.json").read_text())["rows"]
    assert [row["ranks"] for row in rows] == [2] * 6


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(commbench, "run_backend", pytest.fail)
    assert commbench.main(["gloo", "--runs-dir", "/proc/runs"]) == 2
    assert capsys.readouterr().err.startswith("error: cannot write /proc: ")


def test_ctrl_c_keeps_the_rows_of_the_backends_before(tmp_path, monkeypatch):
    row = commbench.Row("gloo", "all-reduce", 4, 2, "cpu", 3, 0.1)
    monkeypatch.setattr(commbench, "why_not", lambda backend, place: "")
    monkeypatch.setattr(
        commbench, "run_backend", Mock(side_effect=[[row], RuntimeError("lost"), KeyboardInterrupt])
    )
    words = ("gloo", "mpi", "horovod", "--runs-dir", str(tmp_path))
    assert commbench.main(words) == 128 + signal.SIGINT
    [path] = tmp_path.glob("*/*")
    content = json.loads(path.read_text())
    assert ([row["backend"] for row in content["rows"]], content["failed"]) == (["gloo"], {"mpi": "lost"})


def flip(tensor):
    """Sum like a backend in which a bit has flipped."""
    tensor[2] = 7.5


def test_a_wrong_sum_is_found():
    liar = types.SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), all_reduce=flip, largest=float)
    with pytest.raises(rank.WrongResultError, match="all-reduce of 20 bytes: 1 elements of a rank are wrong"):
        rank.check(liar, "all-reduce", 5)


def test_a_rank_without_a_launcher_says_so(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(rank, "os", types.SimpleNamespace(environ={}))
    with pytest.raises(UserError, match="RANK is not set: a launcher sets it"):
        rank.main(["--backend", "gloo"])
