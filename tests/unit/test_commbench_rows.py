"""The arithmetic of make commbench, and what it refuses."""

import tempfile
import threading
import time
import types

import pytest
import torch

from recipes.common.errors import UserError
from scripts.bench.commbench import __main__ as command
from scripts.bench.commbench import rank
from scripts.bench.commbench.options import parse_sizes
from scripts.bench.commbench.rows import COLUMNS, Row, bus_factor, link_speed


def test_sizes():
    assert parse_sizes("16m,4,64k,64K,1kb") == [4, 1024, 65536, 16 * 2**20]
    for text in ("", "6", "0", "4,x", "-4", "4.0", "16g"):
        with pytest.raises(UserError, match="--sizes expects multiples of 4 bytes"):
            parse_sizes(text)


def test_a_row_by_hand():
    """4 ranks exchange 64 MB in 0.4 s: 160 MB/s; an all-reduce sends 1.5 times its bytes through each link."""
    row = Row("gloo", "all-reduce", 64_000_000, 4, "cpu", 400_000, 5)
    assert (bus_factor("broadcast", 4), bus_factor("all-gather", 4), bus_factor("all-reduce", 2)) == (1, 0.75, 1)
    cells = [[one.cell(row.as_dict(gbit)) for one in COLUMNS] for gbit in (10, None)]
    assert cells[0] == ["gloo", "all-reduce", "64,000,000", "400,000.0", "0.160", "0.240", "19.2%"]
    assert cells[1] == [*cells[0][:-1], "-"]


def test_an_interface_without_a_speed():
    assert link_speed("lo") is None
    assert link_speed("no-such-interface") is None


def test_gpus_of_a_cluster_may_use_another_network_than_the_interface(monkeypatch):
    """NCCL takes InfiniBand where there is some: the interface's speed says nothing of it."""
    for name, value in {"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "link_speed", lambda interface: 10.0)
    cpu, gpu = (Row("horovod", "all-reduce", 64_000_000, 4, device, 400_000, 5) for device in ("cpu", "cuda"))
    for words, expected in ((["nccl"], (10.0, None)), (["nccl", "--link-gbit", "400"], (400.0, 400.0))):
        args = command.options(words)
        place = command.find_place(args)
        assert (command.speed_of(cpu, place, args), command.speed_of(gpu, place, args)) == expected


def test_on_a_cluster_nccl_gets_the_settings_of_training(monkeypatch, tmp_path):
    """An interface for gloo alone would leave NCCL to choose among all devices."""
    for name in ("FABRIC", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    place = command.Place(2, 1, 1, "eth0", None, node_rank=0, port=29500)
    for own, expected in (({}, "auto"), ({"FABRIC": "ib"}, "ib")):
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        words, environment = command.launcher("nccl", 1, place, tmp_path)
        assert (words, environment["MASTER_PORT"]) == (["scripts/launch.sh", "ddp"], "29501")
        assert (environment["FABRIC"], environment.get("GLOO_SOCKET_IFNAME")) == (expected, None)


def test_the_processes_of_a_clusters_nodes_are_a_variable(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    with pytest.raises(UserError, match="--nproc-per-node is for local nodes; on a cluster, set NPROC_PER_NODE"):
        command.options(["gloo", "--nproc-per-node", "4"])
    assert command.options(["gloo", "--nproc-per-node", "4", "--nodes", "2"]).nproc_per_node == 4


def test_ctrl_c_leaves_no_files_of_a_killed_launcher(tmp_path, monkeypatch):
    def run_side_by_side(commands, *_):
        [(_, environment)] = commands
        tempfile.mkdtemp(prefix="cluster-recipes-", dir=environment["TMPDIR"])
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_side_by_side", run_side_by_side)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert command.main(["gloo", "--nodes", "2", "--runs-dir", str(tmp_path)]) == 130
    assert list(tmp_path.iterdir()) == []


def test_a_bound_ends_with_its_block():
    """Also with one that raises: else it would end the process with a second, wrong line."""
    with pytest.raises(UserError), rank.exit_if_stuck("meeting the others", 60.0):
        raise UserError("refused")
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["glo"], "BACKENDS: invalid choice 'glo'; did you mean 'gloo'? (choose from gloo, nccl, mpi, horovod)"),
        (["--ops", "all-reduce,scatter"], "--ops: invalid choice 'scatter' (choose from "),
        (["--sizes", "5"], "--sizes expects multiples of 4 bytes up to 8g, such as 4,64k,16m, got '5'"),
        (["--nodes", "0"], "NODES expects a whole number from 1 to 1024, got '0'"),
        (["--narrow", "1 gbit"], "--narrow expects a rate such as 100mbit or 1gbit, got '1 gbit'"),
        (["nccl", "--nodes", "1000"], "nccl cannot be measured here: it needs a GPU for each of"),
        (["--seconds", "-1"], "--seconds: expects a number above 0, got '-1'"),
    ],
)
def test_refusals_are_one_line(words, refusal, capsys):
    assert command.main(words) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {refusal}")
    assert text.count("\n") == 1


def test_the_limit_is_on_one_call_and_not_on_all_calls_of_a_line(monkeypatch):
    """A check, two warm-ups and at least three timed calls: together they may take several times as long."""
    ended, slow = [], types.SimpleNamespace(size=1, rank=0, device=torch.device("cpu"), largest=float)
    slow.broadcast = slow.all_gather = None
    slow.all_reduce = lambda data: time.sleep(0.15)
    monkeypatch.setattr(rank.os, "_exit", ended.append)
    result_bytes, latency_s, calls = rank.measure(slow, "all-reduce", 64, 0.01, 0.4)
    assert (result_bytes, calls, ended) == (64, 3, [])
    assert latency_s >= 0.15
    slow.all_reduce = lambda data: time.sleep(0.6)
    rank.measure(slow, "all-reduce", 64, 0.01, 0.4)
    assert set(ended) == {1}
