"""Every launcher gives the same map of ranks, with two processes on each of one or two nodes."""

import functools
import json
import os
import re
import signal
import socket
import sys
import types

import pytest

from recipes.common.errors import UserError
from recipes.common.process.signals import STOP_SIGNALS
from recipes.probe.train import HorovodWorld, check, show
from scripts.launch.local import free_port
from tests.conftest import need_horovod, need_horovod_with_mpi, need_mpi
from tests.support import (
    MPI_ENV,
    PROGRAMS,
    TIMEOUT_S,
    Command,
    Ranks,
    Result,
    run_command,
    start_and_signal,
    wait_until,
)


def torchrun(nodes, nproc_per_node):
    words = ["--nodes", str(nodes), "--nproc-per-node", str(nproc_per_node)]
    return [sys.executable, "-m", "scripts.launch.local", "probe", *words]


def mpirun(nodes, nproc_per_node):
    need_mpi()
    words = ["--nproc-per-node", str(nproc_per_node)]
    size = str(nodes * nproc_per_node)
    command = ["mpirun", "-np", size, sys.executable, "-m", "scripts.launch.mpirun"]
    return [*command, *words, "recipes.probe.train"]


def horovodrun(controller, nodes, nproc_per_node):
    need_horovod()
    words = [str(PROGRAMS / "horovodrun"), f"--{controller}", "--disable-cache", "-np", str(nproc_per_node)]
    return [*words, sys.executable, "-m", "recipes.probe.train", "--join", "horovod"]


def horovodrun_mpi(nodes, nproc_per_node):
    need_horovod_with_mpi()
    return horovodrun("mpi", nodes, nproc_per_node)


def spawn(nodes, nproc_per_node):
    counts = f"--nnodes {nodes} --nproc-per-node {nproc_per_node}"
    one = f"{sys.executable} -m recipes.probe.train --join spawn {counts}"
    starters = [f"{one} --node-rank {node} &" for node in range(nodes)]
    environment = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1"
    return ["bash", "-c", f"export {environment}; {' '.join(starters)} wait"]


horovodrun_gloo = functools.partial(horovodrun, "gloo")
LAUNCHERS = [(torchrun, 2), (spawn, 2), (mpirun, 2), (horovodrun_gloo, 1), (horovodrun_mpi, 1)]
"""Each returns the command that starts the probe on this many nodes, or skips. horovodrun starts other nodes with
ssh; scripts/launch/horovod.py does without. test_mpirun.py has mpirun on one node."""


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "nodes"), LAUNCHERS)
def test_map(launcher, nodes):
    size, world_size = 2, 2 * nodes
    result = run_command(*launcher(nodes, size), OMP_NUM_THREADS="1", check=True, **MPI_ENV)
    [found] = re.findall(r"probe (\{.*\})", result.stdout)  # horovodrun prefixes each line with the rank
    content = json.loads(found)
    assert content["world_size"] == world_size
    assert content["sum"] == sum(range(world_size + 1))
    expected = [
        {"rank": rank, "local_rank": rank % size, "node_rank": rank // size}
        | {"world_size": world_size, "local_world_size": size}
        for rank in range(world_size)
    ]
    assert [{name: row[name] for name in expected[0]} for row in content["ranks"]] == expected
    assert len({row["pid"] for row in content["ranks"]}) == world_size


def test_the_map_for_programs_is_one_write(monkeypatch):
    """Unbuffered output sends each write by itself, and mpirun may prefix it with the rank."""
    written = []
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(write=written.append, flush=lambda: None))
    row = {"rank": 0, "local_rank": 0, "node_rank": 0, "world_size": 1, "local_world_size": 1}
    show([{**row, "host": "a", "device": "cpu", "pid": 7}], 1)
    last = [text for text in written if text][-1]
    assert json.loads(last.removeprefix("probe "))["ranks"][0]["pid"] == 7
    assert last.endswith("\n")


def test_an_output_that_fails_is_one_line(monkeypatch):
    row = {"rank": 0, "local_rank": 0, "node_rank": 0, "world_size": 1, "local_world_size": 1}
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(UserError, match=r"^standard output failed: No space left on device; redirect it to "):
            show([{**row, "host": "a", "device": "cpu", "pid": 7}], 1)


QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.slow
def test_spawned_ranks_refuse_in_one_line():
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **QUIET}
    words = ("--join", "spawn", "--nproc-per-node", "2", "--device", "cuda")
    result = run_command(sys.executable, "-m", "recipes.probe.train", *words, **env)
    assert result.status == 2, result.stderr
    [line] = result.stderr.splitlines()
    assert line.startswith("error: --device cuda: 2 processes on ")


def test_spawned_ranks_whose_reader_has_gone_say_so_in_one_line():
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **QUIET}
    words = f"{sys.executable} -m recipes.probe.train --join spawn --nproc-per-node 2"
    result = run_command("bash", "-c", f"{words} | true; exit $PIPESTATUS", **env)
    assert result == Result(2, "", "error: standard output is closed; redirect it to a file\n")


def test_spawned_ranks_end_with_the_process_that_started_them():
    """The others may never come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), **QUIET}
        words = ("--join", "spawn", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "2")
        node = Command(sys.executable, "-m", "recipes.probe.train", *words, **env)
        waiting = [listener.accept() for _ in range(2)]
        node.process.kill()
        assert node.wait(gone_within_s=20).status == -signal.SIGKILL
        del waiting


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_spawned_ranks_that_wait_for_another_node(number):
    """It trains nothing, so there is nothing to save; it would wait for --timeout-s."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **QUIET}
    words = ("--join", "spawn", "--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "2")
    node = Command(sys.executable, "-m", "recipes.probe.train", *words, **env)
    wait_until(lambda: len(node.processes("spawn_main")) == 2, TIMEOUT_S, "two ranks")
    node.process.send_signal(number)
    assert node.wait(20, gone_within_s=20).status == 0
    assert node.text == f"stopped by {number.name}\n"


@pytest.mark.parametrize("started", [1, 2])
def test_ctrl_c_ends_spawned_ranks_without_a_word(started):
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **QUIET}
    words = ("--join", "spawn", "--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "2")
    node = Command(sys.executable, "-m", "recipes.probe.train", *words, **env)
    wait_until(lambda: len(node.processes("spawn_main")) >= started, TIMEOUT_S, "ranks")
    os.killpg(node.process.pid, signal.SIGINT)
    assert node.wait(20) == Result(-signal.SIGINT, "", "")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_a_rank_starts_leaves_no_traceback_of_it(number):
    words = ("--join", "spawn", "--nproc-per-node", "2")
    outcome = start_and_signal("spawn_main", f"os.kill(os.getpid(), {int(number)})", "recipes.probe.train", *words)
    assert outcome.wait() == Result(0, f"stopped by {number.name}\n", "")


def be_horovod():
    """Replace Horovod, which alone gives a process its rank, with a stand-in."""
    rank = int(os.environ.pop("RANK"))
    del os.environ["LOCAL_RANK"]
    module = types.ModuleType("horovod.torch")
    module.init, module.nccl_built = bool, bool
    module.rank = module.local_rank = lambda: rank
    module.size = module.local_size = lambda: 2
    module.allgather_object = lambda value, name: [value, value]
    sys.modules["horovod"] = types.ModuleType("horovod")
    sys.modules["horovod"].torch = sys.modules["horovod.torch"] = module


def test_ranks_of_horovod_refuse_in_one_line(tmp_path):
    words = ["--join", "horovod", "--device", "cuda"]
    outcome = Ranks("probe", words, 2, tmp_path, setup=be_horovod, **QUIET).wait()
    assert outcome.statuses == [2, 2], outcome.text
    [line] = outcome.text.splitlines()
    assert line.startswith("[0] error: --device cuda: 2 processes on ")


def test_without_horovod_it_is_one_line(monkeypatch):
    def find_spec(name, path=None, target=None):
        if name == "horovod":
            raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(sys, "meta_path", [types.SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"^Horovod is not built for this Python; run `make horovod`$"):
        HorovodWorld("cpu", 300.0)


def test_the_longest_wait_is_horovods_too(monkeypatch):
    stall = ("HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    for name in ("RANK", "LOCAL_RANK", *stall):
        monkeypatch.setenv(name, "0")  # and afterwards as before
    for name in stall:
        del os.environ[name]
    for name in ("horovod", "horovod.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    be_horovod()
    HorovodWorld("cpu", 1.0)
    assert [os.environ[name] for name in stall] == ["1", "1"]


def test_a_wrong_map_is_refused():
    rows = [{"rank": rank, "local_rank": local, "host": "a"} for rank, local in enumerate([0, 1, 1, 0])]
    with pytest.raises(UserError, match="rank 2 on a has local rank 1 after 1"):
        check(rows, 10)
    with pytest.raises(UserError, match="gave 9"):
        check(rows, 9)
