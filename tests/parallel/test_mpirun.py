"""Recipes under mpirun: torchrun's numbers, one line for what cannot work, and no process left behind."""

import contextlib
import dataclasses
import re
import signal
import socket
import sys
import types
from unittest.mock import Mock

import psutil
import pytest

from scripts.launch import mpirun
from scripts.launch.echo import Echo, try_port
from scripts.launch.local import free_port
from tests.conftest import need_mpi, refused
from tests.support import (
    MPI_ENV,
    TIMEOUT_S,
    Command,
    largest_difference,
    losses,
    run_command,
    train,
    wait_until,
    weights,
    words_for,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def mpi():
    need_mpi()


def command(*words):
    return ["mpirun", "-np", "2", sys.executable, "-m", "scripts.launch.mpirun", *words]


def run(*words, **env):
    """Return the outcome without Open MPI 5's own lines about a failed rank, for which it has no -q."""
    done = run_command(*command(*words), **MPI_ENV, **env)
    stderr = re.sub(r"-{70,}\nprterun detected .*?-{70,}\n", "", done.stderr, flags=re.DOTALL)
    return dataclasses.replace(done, stderr=stderr)


def start(tmp_path):
    """Return mpirun with two ranks that have done a step, and train until they are stopped."""
    words = words_for(tmp_path, "endless", "--epochs", "1000000")
    job = Command(*command("recipes.ddp.train", *words), **MPI_ENV)
    job.wait_for_step(tmp_path / "endless", 1)
    wait_until(lambda: "world_size=2" in job.text, TIMEOUT_S, "mpirun to pass on the first line")
    return job


def test_a_script_of_the_users_own(mpi, tmp_path):
    path = tmp_path / "train.py"
    # One write: an unbuffered print() writes the end of its line by itself, and mpirun may mix the two.
    # Lightning asks MPI, which is closed, unless it takes its ranks for torchrun's.
    line = r"{os.environ['RANK']} {os.environ['WORLD_SIZE']} {is_torchelastic_launched()} {sys.argv[1:]}\n"
    imports = "import os, sys; from torch.distributed import is_torchelastic_launched"
    path.write_text(f'{imports}; sys.stdout.write(f"{line}")')
    done = run(str(path), "--out={run_dir}", RUNS_DIR=str(tmp_path))
    assert done.status == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 2 True ['--out={tmp_path}/train']" for rank in range(2)]
    done = run(str(tmp_path / "tran.py"))
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr == f"error: SCRIPT {tmp_path}/tran.py does not exist; did you mean 'train.py'?\n"


def test_losses_are_those_of_torchrun(mpi, tmp_path):
    torchrun = train("ddp", tmp_path, 2, "--max-steps", "10")  # the tests set torchrun's variables
    outcome = run("recipes.ddp.train", *words_for(tmp_path, "mpirun", "--max-steps", "10"))
    assert outcome.status == 0, outcome.stderr
    assert "result recipe=ddp world_size=2" in outcome.stdout
    assert losses(tmp_path / "mpirun") == losses(torchrun)
    assert largest_difference(weights(tmp_path / "mpirun"), weights(torchrun)) == 0


def test_a_refusal_is_one_line_and_status_2(mpi):
    for words, line in (
        ("recipes.dpp.train", "there is no module recipes.dpp.train; did you mean 'recipes.ddp.train'?"),
        ("recipes.ddp.train --lr 0", "--lr: expects a number above 0, got '0'"),
    ):
        outcome = run(*words.split())
        assert (outcome.status, outcome.stderr) == (2, f"error: {line}\n")


def test_usr1_writes_a_checkpoint(mpi, tmp_path):
    job = start(tmp_path)
    job.process.send_signal(signal.SIGUSR1)
    result = job.wait(gone_within_s=20, check=True)
    assert "stopped by SIGUSR1: wrote" in result.stdout


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_job(mpi, tmp_path, lost):
    job = start(tmp_path)
    psutil.Process(job.process.pid).children()[lost].kill()
    result = job.wait(20, gone_within_s=20)
    assert result.status != 0
    assert "frame #" not in result.stderr, "C++ frames of a lost store"


def test_no_rank_outlives_mpirun(mpi, tmp_path):
    job = start(tmp_path)
    job.process.kill()
    job.wait(gone_within_s=20)


def mpi4py_with(error=None):
    """Return an mpi4py module of one process, or one whose MPI does not load."""
    module = types.ModuleType("mpi4py")
    if error:
        module.__getattr__ = Mock(side_effect=error)
    else:
        world = types.SimpleNamespace(size=1, rank=0)
        module.MPI = types.SimpleNamespace(COMM_WORLD=world, get_vendor=lambda: ("Open MPI", (4, 1, 4)))
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "mpi4py is not installed; pip install mpi4py"),
        (mpi4py_with(error=RuntimeError("cannot load MPI\nlibmpi.so")), "cannot load MPI libmpi.so"),
        (mpi4py_with(error=ImportError("libmpi.so.12: cannot open", name="mpi4py.MPI")), "mpi4py finds no MPI"),
        (mpi4py_with(), "started 2 processes, but mpi4py's MPI (Open MPI 4.1.4) sees only itself"),
    ],
)
@pytest.mark.parametrize(
    ("size_name", "rank_name"),
    [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")],
)
def test_what_is_missing_is_said_once(monkeypatch, capsys, module, reason, size_name, rank_name):
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    monkeypatch.setenv(size_name, "2")
    waited = []
    monkeypatch.setattr(mpirun, "wait_for_rank_0", waited.append)
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv(rank_name, rank)
        with pytest.raises(SystemExit) as caught:
            mpirun.start_mpi()
        assert caught.value.code == 2
        text = capsys.readouterr().err
        assert len(text.splitlines()) == lines
        assert rank == "1" or reason in text
    assert waited == [2], "rank 1 waits: Open MPI 5 kills rank 0 at once where another rank exits first"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "no module to start; usage: mpirun -np 4 python -m scripts.launch.mpirun"),
        (["--nproc-per-node", "0", "recipes.ddp.train"], "--nproc-per-node: expects a whole number of at least 1"),
        (["--nodes", "2", "recipes.ddp.train"], "unknown option --nodes"),
        (["nothing.at.all"], "there is no module nothing.at.all"),
        (["recipes.horovod.train"], "horovod"),
    ],
)
def test_words_that_cannot_work(words, reason):
    with refused(reason):
        mpirun.parse_args(words)


def test_an_address_counts_only_if_rank_0_answers():
    port = free_port()
    here, other = Echo("", "the token", port), Echo("", "another", free_port())

    def is_reached(address, port):
        return try_port(address, port, "the token", size=0)["stage"] == "done"

    with contextlib.closing(here), contextlib.closing(other):
        assert is_reached("127.0.0.1", port)
        assert not is_reached("127.0.0.1", other.port)
        addresses = mpirun.own_addresses()
        assert not any(address.startswith("127.") for address in addresses)
        assert all(is_reached(address, port) for address in addresses)
    assert not is_reached("127.0.0.1", port)
    Echo("", "the token", port).close()  # the port is free again at once


def test_a_host_without_ipv4_is_reached_by_ipv6(monkeypatch):
    """An address of one link (fe80::) means nothing on another host."""
    by_family = {
        socket.AF_INET: {"lo": ["127.0.0.1"]},
        socket.AF_INET6: {"lo": ["::1"], "eth0": ["fe80::7", "fd00::7"], "down": ["fd00::8"]},
    }
    monkeypatch.setattr("scripts.launch.interface.interface_addresses", by_family.get)
    state = {name: types.SimpleNamespace(isup=name != "down") for name in ("lo", "eth0", "down")}
    monkeypatch.setattr("psutil.net_if_stats", lambda: state)
    assert mpirun.own_addresses() == ["fd00::7"]
    by_family[socket.AF_INET]["eth0"] = ["10.0.0.7"]
    assert mpirun.own_addresses() == ["10.0.0.7", "fd00::7"]


class Communicator:
    """Stands for the processes of MPI, with what another one sends."""

    def __init__(self, rank, other=""):
        self.rank, self.other = rank, other

    def bcast(self, value):
        return value

    def allgather(self, value):
        return [value, self.other]


@pytest.mark.parametrize("is_reached", [True, False])
def test_an_address_that_one_node_does_not_reach_is_not_taken(monkeypatch, capsys, is_reached):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    world, local = Communicator(0, is_reached), Communicator(0)
    if is_reached:
        assert mpirun.choose_address(world, local, False) == ("127.0.0.1", port)
        return
    with pytest.raises(SystemExit) as caught:
        mpirun.choose_address(world, local, False)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: no node reaches rank 0 at 127.0.0.1, port {port}; set MASTER_ADDR\n"


def test_on_several_hosts_the_networks_environment_is_set(monkeypatch, capsys):
    """Gloo alone would take the address of each host's own name, which may be a loopback."""
    for name in ("FABRIC", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SITE_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    found = mpirun.fabric_variables(Communicator(0, ("", 0)), Communicator(0))
    assert (found["FABRIC"], found["GLOO_SOCKET_IFNAME"]) == ("auto", "lo")
    assert not {"PATH", "PYTHON", "PWD", "MASTER_ADDR"} & {*found}
    assert "127.0.0.1 by lo" in capsys.readouterr().out
    mpirun.fabric_variables(Communicator(1, ("", 0)), Communicator(1))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("fabric", "other", "status"),
    [("none", ("", 0), 2), ("auto", ("FABRIC expects auto", 2), 2), ("auto", ("FABRIC expects auto", 1), 1)],
)
def test_a_fabric_that_cannot_be_used_on_one_host_is_said_once(monkeypatch, capsys, fabric, other, status):
    monkeypatch.setenv("FABRIC", fabric)
    for rank, lines in ((0, 1), (1, 0)):
        with pytest.raises(SystemExit) as caught:
            mpirun.fabric_variables(Communicator(rank, other), Communicator(0))
        assert caught.value.code == status
        error = capsys.readouterr().err
        assert (error.count("\n"), error.startswith("error: FABRIC expects auto")) == (lines, bool(lines))
