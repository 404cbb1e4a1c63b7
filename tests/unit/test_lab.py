"""The test cluster's own guards: what it deletes, and which process it takes for its own."""

import os
import signal
import sys

import pytest

from scripts.lab import network
from scripts.launch.processes import Ended, run_side_by_side
from tests.conftest import need_namespaces
from tests.support import Command, run_command, wait_until, write_program


def slurm_cluster(folder, command):
    return run_command("scripts/lab/slurm_cluster.sh", command, SLURM_CLUSTER_DIR=str(folder))


def test_a_folder_that_is_no_clusters_is_not_deleted(tmp_path):
    (tmp_path / "thesis.tex").write_text("the only copy")
    result = slurm_cluster(tmp_path, "down")
    assert result.status == 2
    assert f"error: SLURM_CLUSTER_DIR {tmp_path} has files that are not a test cluster's" in result.stderr
    assert (tmp_path / "thesis.tex").read_text() == "the only copy"


def test_the_state_of_a_cluster_that_has_ended_is_deleted(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / "slurm.conf").write_text("ClusterName=recipes\nSlurmUser=root\n")
    assert slurm_cluster(state, "down").status == 0
    assert not state.exists()


def test_another_process_with_the_number_of_one_that_has_ended_is_no_cluster(tmp_path):
    """`down` kills all processes in the network of the process that it finds."""
    (tmp_path / "pid").write_text(f"{os.getpid()}\n")
    assert slurm_cluster(tmp_path, "status").stdout == "no test cluster is up\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_cluster_whose_start_is_interrupted_is_killed(tmp_path, number):
    (tmp_path / "bin").mkdir()
    for name in ("munged", "slurmctld", "slurmd", "sbatch", "ip", "nsenter"):
        write_program(tmp_path / "bin" / name, "exit 1")
    write_program(tmp_path / "bin/id", "echo 0")
    write_program(tmp_path / "bin/unshare", "trap '' INT TERM\nsleep 1000 &\nwait")  # as unshare --fork does
    path, state = f"{tmp_path}/bin:{os.environ['PATH']}", tmp_path / "state"
    up = Command("scripts/lab/slurm_cluster.sh", "up", PATH=path, SLURM_CLUSTER_DIR=str(state))
    wait_until(lambda: up.processes("sleep 1000") and (state / "pid").exists(), 20, lambda: up.text)
    assert (state / "pid").read_text() == f"{up.processes('sleep 1000')[0].pid}\n"
    os.killpg(up.process.pid, number)
    assert up.wait(20).status == (130 if number == signal.SIGINT else -number)  # and nothing of it is left
    assert not (state / "pid").exists()


INSIDE = """
import time
from scripts.lab import network
network.enter("inside", [])
try:
    print("runs", flush=True)
    time.sleep(1000)
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize(
    ("number", "status", "end"), [(signal.SIGTERM, -signal.SIGTERM, ""), (signal.SIGINT, 130, "cleaned up\n")]
)
def test_a_command_in_namespaces_ends_at_a_signal(tmp_path, number, status, end):
    need_namespaces()
    (tmp_path / "inside.py").write_text(INSIDE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = Command(sys.executable, "-m", "inside", PYTHONPATH=path)
    wait_until(lambda: command.text, 20, "the command to run inside")
    (os.killpg if end else os.kill)(command.process.pid, number)
    result = command.wait(20)  # nothing of it is left
    assert (result.status, result.stdout) == (status, f"runs\n{end}")


def test_only_what_is_killed_at_the_time_limit_is_late(tmp_path):
    commands = [(["true"], os.environ), (["sleep", "60"], os.environ)]
    ended = run_side_by_side(commands, tmp_path, 0.5)
    assert [(one.status, one.is_late) for one in ended] == [(0, False), (-9, True)]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (Ended(1, False, "no space left"), "rank 1 of 3 ended with status 1: no space left"),
        (Ended(-6, False, "Connection refused"), "rank 1 of 3 ended with status -6: Connection refused"),
        (Ended(-9, True, "step 3"), "rank 0 of 3 did not end within 1 s: waiting"),
    ],
)
def test_the_rank_that_failed_is_named_and_not_one_that_waited_for_it(monkeypatch, second, said):
    ended = [Ended(-9, second.is_late, "waiting"), second, Ended(0, False, "")]
    monkeypatch.setattr(network, "run_side_by_side", lambda *_: ended)
    net = object.__new__(network.Network)
    net.names, net.addresses = ["n0", "n1", "n2"], ["10.79.0.1", "10.79.0.2", "10.79.0.3"]
    with pytest.raises(RuntimeError, match=said):
        net.run_ranks(["true"], 3, 1, 1.0)
