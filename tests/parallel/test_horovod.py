"""Horovod: the curve of single without compression, a stated tolerance with it, and each way of starting it."""

import re
import signal
import sys

import pytest

from tests.conftest import need_horovod, need_horovod_with_mpi
from tests.support import MPI_ENV, PROGRAMS, assert_same_run, local, losses, run_command, words_for

pytestmark = pytest.mark.slow

STEPS = ("--max-steps", "30", "--seed", "1", "--deterministic")
ENDLESS = (*STEPS, "--max-steps", "100000", "--epochs", "100000")


@pytest.fixture(autouse=True)
def horovod():
    need_horovod()


def test_two_local_nodes_equal_single_without_compression(single, tmp_path):
    words = words_for(tmp_path, "horovod", *STEPS, "--compression", "none")
    result = local("horovod", 2, 2, *words).wait(check=True)
    assert "result recipe=horovod world_size=4 " in result.stdout
    assert_same_run(tmp_path / "horovod", single)


def test_a_signal_ends_it_with_a_checkpoint(tmp_path):
    command = local("horovod", 2, 1, *words_for(tmp_path, "horovod", *ENDLESS, "--compression", "none"))
    command.wait_for_step(tmp_path / "horovod", 5)
    command.process.send_signal(signal.SIGUSR1)
    result = command.wait(check=True)
    # On a busy machine, rank 1's vote may reach rank 0 before rank 0's own signal.
    assert re.search("^stopped by (SIGUSR1|a signal to another rank): wrote ", result.stdout, re.MULTILINE)


def test_kill_of_a_rank_ends_all(tmp_path):
    command = local("horovod", 2, 1, *words_for(tmp_path, "horovod", *ENDLESS))
    command.wait_for_step(tmp_path / "horovod", 3)
    ranks = {process.environ()["RANK"]: process for process in command.processes("-m recipes.horovod.train")}
    ranks["1"].kill()
    assert command.wait(gone_within_s=10).status != 0
    # Horovod passes gloo's error on or only says that it has ended, by what it was doing.
    why = "Horovod has been shut down|Connection (reset|closed) by peer|Broken pipe"
    assert re.search(f"^error: rank 0 on .* lost another rank: ({why})$", command.text, re.MULTILINE), command.text
    assert "Traceback" not in command.text


def test_a_bad_option_is_one_line(tmp_path):
    assert "--compression" in local("horovod", 2, 1, "--compresion", "none").wait().refusal


def test_horovodrun_starts_it(single, tmp_path):
    """With Gloo; test_probe.py makes it start ranks with MPI."""
    check_started(single, tmp_path, str(PROGRAMS / "horovodrun"), "--gloo", "--disable-cache")


def test_mpirun_starts_it(single, tmp_path):
    need_horovod_with_mpi()
    check_started(single, tmp_path, "mpirun", **MPI_ENV)


@pytest.mark.parametrize(
    ("launcher", "command", "env"),
    [
        ("torchrun", (str(PROGRAMS / "torchrun"), "--nproc-per-node=2"), {}),
        # What MPICH's mpirun sets; Horovod is built for another MPI.
        ("another MPI", (sys.executable,), {"PMI_SIZE": "2", "PMI_RANK": "0"}),
    ],
)
def test_processes_that_horovod_does_not_connect_are_refused(tmp_path, launcher, command, env):
    """Otherwise each would train alone on all of the data, and write the same record."""
    words = words_for(tmp_path, "horovod", *STEPS)
    result = run_command(*command, "-m", "recipes.horovod.train", *words, **env)
    assert result.status != 0
    fix = "start them with `make run RECIPE=horovod`, horovodrun or the mpirun of the MPI it was built for"
    assert result.errors == [f"error: Horovod does not connect processes that {launcher} starts; {fix}"]
    assert not [*tmp_path.iterdir()]


def check_started(single, folder, *launcher, **env):
    """Assert that two ranks, each with one thread, have the losses of single."""
    words = words_for(folder, "horovod", *STEPS, "--compression", "none")
    ranks = ("-np", "2", sys.executable, "-m", "recipes.horovod.train", *words)
    run_command(*launcher, *ranks, OMP_NUM_THREADS="1", check=True, **env)
    assert losses(folder / "horovod") == pytest.approx(losses(single), rel=1e-5)
