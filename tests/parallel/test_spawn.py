"""torch.multiprocessing.spawn: the numbers of single; signals arrive, and nothing is left behind."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes.common.errors import UserError
from recipes.spawn import train as spawn
from scripts.launch.local import free_port
from tests.support import (
    ROOT,
    TIMEOUT_S,
    assert_same_run,
    run_command,
    weights,
)

STEPS = shlex.split(
    "--max-steps 24 --checkpoint-every 12 --global-batch-size 96 --seed 2 --lr 0.01 --warmup-steps 5 "
    "--lr-schedule constant"
)


class Starters:
    """One starter per node, each in its own session, as a cluster would start them."""

    def __init__(
        self, folder: Path, nnodes: int, nproc_per_node: int, *argv: str, early: bool = False, **env: str
    ):
        folder.mkdir(parents=True, exist_ok=True)
        words = ("--runs-dir", str(folder), "--log-every", "1", "--no-tensorboard", *argv)
        shared = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")},
            **{"PYTHON": sys.executable, "NNODES": str(nnodes), "NPROC_PER_NODE": str(nproc_per_node)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"},
            **env,
        }
        self.outputs = [folder / f"node{node}.txt" for node in range(nnodes)]
        self.nodes = [
            subprocess.Popen(
                ["scripts/launch.sh", "spawn", *words],
                cwd=ROOT,
                env={**shared, "NODE_RANK": str(node)},
                stdout=open(self.outputs[node], "w"),  # noqa: SIM115
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for node in range(nnodes)
        ]

    def text(self) -> str:
        return "".join(path.read_text() for path in self.outputs)

    def wait_for(self, is_so, what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert all(node.poll() is None for node in self.nodes), f"ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"not {what}:\n{self.text()}"
            time.sleep(0.02)

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.text(), text)

    def ranks(self, node: int = 0) -> list[psutil.Process]:
        """Return a starter's ranks, without the helper process of multiprocessing."""
        found = []
        for child in psutil.Process(self.nodes[node].pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a short-lived helper may end meanwhile
                if "spawn_main" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[int]:
        """Return the starters' exit statuses; fail the test if a starter or rank still runs after timeout_s."""
        deadline = time.monotonic() + timeout_s
        try:
            statuses = [node.wait(max(0.1, deadline - time.monotonic())) for node in self.nodes]
            while left := self.left():
                assert time.monotonic() < deadline, f"orphans: {left}"
                time.sleep(0.05)
            return statuses
        finally:
            for node in self.nodes:
                for process in self.left():
                    process.kill()
                node.wait()

    def left(self) -> list[psutil.Process]:
        sessions = {node.pid for node in self.nodes}
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found


def train_spawned(folder: Path, nnodes: int, nproc_per_node: int, *argv: str) -> Path:
    starters = Starters(folder, nnodes, nproc_per_node, "--name", "run", *argv)
    assert starters.wait() == [0] * nnodes, starters.text()
    assert f"result recipe=spawn world_size={nnodes * nproc_per_node} " in starters.text()
    return folder / "run"


@pytest.mark.parametrize(("nnodes", "nproc_per_node"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_every_step_equals_single(single, tmp_path, nnodes, nproc_per_node):
    run = train_spawned(tmp_path, nnodes, nproc_per_node, *STEPS)
    assert_same_run(run, single)


@pytest.mark.slow
def test_a_signal_to_the_starter_ends_with_a_checkpoint(tmp_path):
    starters = Starters(tmp_path, 1, 2, "--name", "s", "--epochs", "10000")
    starters.wait_for_text("epoch 1")
    starters.nodes[0].send_signal(signal.SIGUSR1)
    assert starters.wait() == [0], starters.text()
    assert "wrote" in starters.text()
    assert weights(tmp_path / "s")


@pytest.mark.slow
def test_a_signal_while_ranks_import_torch_is_not_lost(tmp_path):
    starters = Starters(tmp_path, 1, 2, "--name", "s", "--epochs", "10000")
    starters.wait_for(lambda: len(starters.ranks()) == 2, "two ranks")
    starters.nodes[0].send_signal(signal.SIGTERM)
    sent_at = time.monotonic()
    assert starters.wait() == [0], starters.text()
    if time.monotonic() - sent_at > spawn.MEETING_S and "before the ranks had met" in starters.text():
        return  # the import was slow; ranks that have not met lose no work
    assert "stopped by SIGTERM: wrote" in starters.text()


@pytest.mark.slow
def test_a_signal_while_ranks_wait_for_another_node_ends_them(tmp_path):
    """Otherwise they would wait for that node for --timeout-s, but Slurm kills a job 30 s after the signal."""
    starters = Starters(tmp_path, 2, 1, "--epochs", "10000")
    starters.nodes[1].kill()
    starters.nodes.pop().wait()
    starters.wait_for(lambda: starters.ranks(), "a rank")
    starters.nodes[0].send_signal(signal.SIGTERM)
    assert starters.wait(29) == [0], starters.text()
    assert "stopped by SIGTERM before the ranks had met" in starters.text()


@pytest.mark.slow
def test_a_signal_while_the_starter_imports_torch_is_not_lost(tmp_path):
    starters = Starters(tmp_path, 1, 2, "--epochs", "10000")
    name = "recipes.spawn.train"  # launch.sh and scripts/launch/hold_signals.py have done their part
    starters.wait_for(lambda: psutil.Process(starters.nodes[0].pid).cmdline()[1:3] == ["-m", name], name)
    starters.nodes[0].send_signal(signal.SIGTERM)
    assert starters.wait() == [0], starters.text()
    assert re.search(r"stopped by SIGTERM", starters.text())


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path):
    victim = 1
    starters = Starters(tmp_path, 2, 1, "--epochs", "10000")
    starters.wait_for_text("epoch 1")
    rank = starters.ranks(victim)[0]
    rank.kill()
    statuses = starters.wait(10)
    assert statuses[victim] == 128 + signal.SIGKILL
    assert statuses[1 - victim] == 1
    named = rf"^error: rank {victim} \(pid {rank.pid} on .*\) was killed by SIGKILL$"
    assert re.search(named, starters.text(), re.MULTILINE), starters.text()
    assert "Traceback" not in starters.text()


@pytest.mark.slow
def test_a_killed_starter_takes_its_ranks_along(tmp_path):
    starters = Starters(tmp_path, 1, 2, "--epochs", "10000")
    starters.wait_for_text("epoch 1")
    starters.nodes[0].kill()
    assert starters.wait(10) == [-signal.SIGKILL]


@pytest.mark.slow
def test_a_refusal_after_the_start_is_one_line_and_status_2_on_every_node(tmp_path):
    starters = Starters(tmp_path, 2, 1, "--model", "lenett")
    assert starters.wait() == [2, 2]
    assert len(re.findall("^error: ", starters.text(), re.MULTILINE)) == 1
    assert "did you mean 'lenet'" in starters.text()


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
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        spawn.main(argv)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_taken_port_is_refused_in_one_line():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_command("scripts/launch.sh", "spawn", PYTHON=sys.executable, MASTER_PORT=port)
    assert done.status == 2
    assert done.stderr == f"error: MASTER_PORT {port} is taken; choose another one\n"
    assert not done.stdout
