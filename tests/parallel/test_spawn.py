"""torch.multiprocessing.spawn: the numbers of single; signals arrive, and nothing is left behind."""

import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from recipes.spawn import train as spawn
from scripts.launch.local import free_port
from tests.conftest import refused
from tests.parallel.test_scratch import STEPS
from tests.support import (
    TIMEOUT_S,
    Command,
    Result,
    assert_same_run,
    start_and_signal,
    wait_until,
    weights,
    words_for,
)


def start(folder, nnodes, nproc_per_node, *argv):
    """Start a starter of the run `run` on each node, as a cluster would."""
    shared = {"PYTHON": sys.executable, "NNODES": str(nnodes), "NPROC_PER_NODE": str(nproc_per_node)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    words = ("scripts/launch.sh", "spawn", *words_for(folder, "run", *argv))
    return [Command(*words, NODE_RANK=str(node), **shared) for node in range(nnodes)]


def ranks(node):
    """Return a starter's ranks, without the helper process of multiprocessing."""
    return node.processes("spawn_main")


@pytest.mark.slow  # test_contract.py starts the ranks of one node
@pytest.mark.parametrize(("nnodes", "nproc_per_node"), [(1, 2), (2, 1)])
def test_every_step_equals_single(single, tmp_path, nnodes, nproc_per_node):
    results = [node.wait() for node in start(tmp_path, nnodes, nproc_per_node, *STEPS)]
    assert [result.status for result in results] == [0] * nnodes, results
    assert f"result recipe=spawn world_size={nnodes * nproc_per_node} " in results[0].stdout
    assert_same_run(tmp_path / "run", single)


@pytest.mark.slow
def test_a_signal_to_the_starter_ends_with_a_checkpoint(tmp_path):
    [node] = start(tmp_path, 1, 2, "--epochs", "10000")
    node.wait_for_step(tmp_path / "run", 1)
    node.process.send_signal(signal.SIGUSR1)
    result = node.wait(check=True)
    assert "wrote" in result.stdout
    assert weights(tmp_path / "run")


@pytest.mark.slow
def test_a_signal_while_ranks_import_torch_is_not_lost(tmp_path):
    [node] = start(tmp_path, 1, 2, "--epochs", "10000")
    wait_until(lambda: len(ranks(node)) == 2, TIMEOUT_S, "two ranks")
    node.process.send_signal(signal.SIGTERM)
    sent_at = time.monotonic()
    result = node.wait(check=True)
    if time.monotonic() - sent_at > spawn.RENDEZVOUS_GRACE_S and "before the ranks had met" in node.text:
        return  # the import was slow; ranks that have not met lose no work
    assert "stopped by SIGTERM: wrote" in result.stdout


@pytest.mark.slow
def test_a_signal_while_ranks_wait_for_another_node_ends_them(tmp_path):
    """Otherwise they would wait for that node for --timeout-s, but Slurm kills a job 30 s after the signal."""
    node, lost = start(tmp_path, 2, 1, "--epochs", "10000")
    lost.kill()
    wait_until(lambda: ranks(node), TIMEOUT_S, "a rank")
    node.process.send_signal(signal.SIGTERM)
    node.wait(29, check=True)
    assert "stopped by SIGTERM before the ranks had met" in node.text


@pytest.mark.slow
def test_a_signal_while_the_starter_imports_torch_is_not_lost(tmp_path):
    [node] = start(tmp_path, 1, 2, "--epochs", "10000")
    name = "recipes.spawn.train"  # launch.sh and scripts/launch/hold_signals.py have done their part
    starter = psutil.Process(node.process.pid)
    wait_until(lambda: starter.cmdline()[1:3] == ["-m", name], TIMEOUT_S, name)
    starter.send_signal(signal.SIGTERM)
    node.wait(check=True)
    assert "stopped by SIGTERM" in node.text


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path, lost):
    """The store goes with rank 0; torch would print its C++ frames on all other ranks."""
    nodes = start(tmp_path, 2, 1, "--epochs", "10000")
    nodes[0].wait_for_step(tmp_path / "run", 1)
    [victim] = ranks(nodes[lost])
    victim.kill()
    ended = [node.wait(10) for node in nodes]
    assert [node.status for node in ended] == [128 + signal.SIGKILL if i == lost else 1 for i in range(2)]
    named = rf"error: rank {lost} \(pid {victim.pid} on .*\) was killed by SIGKILL"
    assert any(re.fullmatch(named, line) for line in ended[lost].errors), ended[lost]
    for noise in ("Traceback", "frame #"):
        assert noise not in nodes[0].text + nodes[1].text


@pytest.mark.slow
def test_a_killed_starter_takes_its_ranks_along(tmp_path):
    [node] = start(tmp_path, 1, 2, "--epochs", "10000")
    node.wait_for_step(tmp_path / "run", 1)
    node.process.kill()
    assert node.wait(10, gone_within_s=10).status == -signal.SIGKILL


def test_ctrl_c_while_ranks_start_leaves_no_traceback_of_them(tmp_path):
    words = words_for(tmp_path, "run", "--nproc-per-node", "2")
    job = start_and_signal("spawn_main", "os.kill(os.getpid(), 2)", "recipes.spawn.train", *words)
    assert job.wait() == Result(-signal.SIGINT, "", "")


STUCK = """
import multiprocessing, os, time
from types import SimpleNamespace
from recipes.spawn import train

def start_ranks(args, node, has_met):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=time.sleep, args=(1000,)), context.Process(target=os._exit, args=(5,))]
    for process in processes:
        process.start()
    processes[0].kill = lambda: None
    return SimpleNamespace(processes=processes, pids=lambda: [process.pid for process in processes])

train.start_ranks, train.FAILURE_GRACE_S, train.STUCK_S = start_ranks, 0.1, 0.5
raise SystemExit(train.run_main(lambda: train.main(["--nproc-per-node", "2", "--device", "cpu"])))
"""


def test_a_rank_that_cannot_end_does_not_hold_its_starter():
    """A killed rank stays as long as the kernel waits for a file server; here, nothing kills it."""
    starter = Command(sys.executable, "-c", STUCK, MASTER_PORT=str(free_port()))
    assert starter.process.wait(TIMEOUT_S) == 5, starter.text
    [stuck] = starter.processes("spawn_main")
    first, second = starter.text.splitlines()
    assert re.fullmatch(r"error: rank 1 \(pid \d+ on .*\) ended with status 5; its own error is above", first)
    what = rf"rank 0 \(pid {stuck.pid} on .*\) was killed, and cannot end"
    fix = r"a file system does not answer \(see dmesg, df\); repair it, then add --resume auto"
    assert re.fullmatch(f"error: {what}: {fix}", second)
    starter.kill()


@pytest.mark.parametrize(("others", "status"), [(5, 5), (0, 3)])
def test_a_rank_that_cannot_end_is_no_success(monkeypatch, others, status):
    """After a stop signal before the ranks have met, no status is known."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    stuck = SimpleNamespace(join=lambda timeout: None, exitcode=None, pid=7)
    with pytest.raises(SystemExit) as ended:
        spawn.leave_stuck_rank(SimpleNamespace(processes=[stuck]), 0, others)
    assert ended.value.code == status


@pytest.mark.slow
def test_a_refusal_after_the_start_is_one_line_and_status_2_on_every_node(tmp_path):
    first, second = (node.wait() for node in start(tmp_path, 2, 1, "--model", "lenett"))
    assert (first.status, second.status) == (2, 2)
    [line] = first.errors + second.errors
    assert "did you mean 'lenet'" in line


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["--nnodes", "2", "--node-rank", "2"], {"MASTER_ADDR": "127.0.0.1"}, "--node-rank 2 of --nnodes 2"),
        (["--nproc-per-node", "0"], {}, "--nproc-per-node: expects a whole number of at least 1, got '0'"),
        (["--nnodes", "2"], {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ([], {"MASTER_PORT": "70000"}, "from 1 to 65535"),
        (["--nproc-per-nodes", "2"], {}, "did you mean '--nproc-per-node'"),
        (
            ["--nnodes", "2", "--node-rank", "1", "--rdzv-timeout-s", "1"],
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
            "waited 1 s for node 0 at 127.0.0.1:9",
        ),
    ],
)
def test_bad_places_are_refused_before_anything_starts(monkeypatch, argv, env, words):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with refused(words):
        spawn.main(argv)
