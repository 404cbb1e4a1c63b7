"""`make submit LOCAL=1`: submitit's local executor, with ranks, record and signals as in a job of Slurm."""

import json
import re
import signal
import sys

import pytest

from tests.support import Command, is_equal, losses, train, wait_until, weights, words_for

pytestmark = pytest.mark.slow

LONG = ("--epochs", "30", "--deterministic")


def submit(*arguments):
    command = [sys.executable, "-m", "slurm.submit", arguments[0], "--local", *arguments[1:]]
    return Command(*command, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")


def ranks(command):
    return command.find("submitit.core._submit")


def wait_for_log(command, step, run):
    wait_until(lambda: (run / "metrics.jsonl").exists(), 60, lambda: f"{run}\n{command.text}")
    command.wait_for_step(run, step)


def test_two_ranks_requeued_end_with_the_weights_of_an_undisturbed_run(tmp_path):
    run = tmp_path / "mine"
    command = submit("ddp", "--nodes", "2", "--", *words_for(tmp_path, run.name, *LONG))
    wait_for_log(command, 60, run)
    for rank in ranks(command):
        rank.send_signal(signal.SIGUSR1)
    done = command.wait()
    assert done.status == 0, done.stdout + done.stderr
    assert "ddp on 2 x 1 processes, all on this machine as one node, record " in done.stdout
    assert "stopped by SIGUSR1: wrote" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("result recipe=ddp world_size=2 ")
    undisturbed = train("ddp", tmp_path, 2, *LONG)
    assert is_equal(weights(run), weights(undisturbed))
    assert losses(run) == losses(undisturbed)
    assert len(json.loads((run / "config.json").read_text())["launches"]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_ctrl_c_ends_the_ranks_with_a_checkpoint(tmp_path, number):
    run = tmp_path / "mine"
    command = submit("single", "--", *words_for(tmp_path, run.name, "--epochs", "400"))
    wait_for_log(command, 20, run)
    command.process.send_signal(number)
    done = command.wait()
    assert done.status == 130
    assert "interrupted, ranks write a checkpoint" in done.stdout
    assert "stopped by SIGTERM: wrote" in done.stdout
    assert done.stderr == ""
    assert list((run / "checkpoints").glob("step-*.pt"))


def test_a_sweep_runs_point_by_point_and_one_refusal_is_not_the_end(tmp_path):
    (tmp_path / "bad/train").mkdir(parents=True)
    grid = "data=digits,imagefolder"
    options = words_for(tmp_path, "grid", "--epochs", "1", "--data-dir", str(tmp_path / "bad"))
    done = submit("single", "--sweep", grid, "--", *options).wait()
    assert done.status == 2
    table = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert table[0] == ["run", "data", "world_size", "test_accuracy", "samples_per_s"]
    assert table[1][:3] == ["grid-datadigits", "digits", "1"]
    assert table[2] == ["grid-dataimagefolder", "imagefolder", "-", "-", "-"]
    assert re.search(r"^\d+_0_log.out: error: --data-dir", done.stderr, re.MULTILINE)
    assert "(data imagefolder) was refused by the recipe; all ranks' logs: " in done.errors[-1]


def test_a_killed_rank_ends_the_job(tmp_path):
    run = tmp_path / "mine"
    command = submit("ddp", "--nproc-per-node", "2", "--", *words_for(tmp_path, run.name, "--epochs", "400"))
    wait_for_log(command, 20, run)
    victim = next(rank for rank in ranks(command) if rank.environ()["SUBMITIT_LOCAL_GLOBALID"] == "1")
    victim.kill()
    done = command.wait()
    assert done.status == 1
    assert "error: rank 0 on " in done.stdout
    assert "lost another rank" in done.stdout
    assert "ended before the run was complete" in done.errors[-1]
