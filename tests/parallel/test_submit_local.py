"""`make submit LOCAL=1`: what a job of Slurm would train, as `make run` does, and the points of a sweep."""

import os
import signal
import sys

import pytest

from tests.support import TIMEOUT_S, Command, wait_until, words_for

pytestmark = pytest.mark.slow


def submit(*arguments, **env):
    command = [sys.executable, "-m", "slurm.submit", arguments[0], "--local", *arguments[1:]]
    return Command(*command, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", **env)


def test_it_becomes_the_launcher_of_local_nodes(tmp_path):
    """TERM reaches the ranks, here of a script, which needs no torch."""
    source = "import os, time; print('trains', os.environ['NODE_RANK'], flush=True); time.sleep(100)"
    (tmp_path / "train.py").write_text(source)
    env = {"SCRIPT": str(tmp_path / "train.py"), "RUNS_DIR": str(tmp_path / "runs")}
    command = submit("ddp", "--nodes", "2", "--name", "mine", **env)
    for node in "01":
        wait_until(lambda node=node: f"trains {node}\n" in command.text, TIMEOUT_S, lambda: command.text)
    command.process.send_signal(signal.SIGTERM)
    done = command.wait(check=True)
    assert " on 2 nodes, all on this machine, record " in done.stdout
    assert "stopped by SIGTERM, for which a rank had no handler\n" in done.stdout


@pytest.mark.parametrize("sweep", [(), ("--sweep", "lr=0.1,0.2")], ids=["one", "sweep"])
def test_ctrl_c_says_how_this_command_resumes(tmp_path, sweep):
    command = submit("single", *sweep, "--name", "mine", "--", "--runs-dir", str(tmp_path), "--epochs", "900")
    command.wait_for_step(tmp_path / ("mine-lr0.1" if sweep else "mine"), 1)
    os.killpg(command.process.pid, signal.SIGINT)
    done = command.wait()
    how = "to resume, the same command with NAME=mine ARGS='... --resume auto'"
    assert (done.status, done.stderr) == (130, f"interrupted; checkpoints so far are whole: {how}\n")


def test_points_of_a_script_run_one_by_one(tmp_path):
    (tmp_path / "train.py").write_text("import os, sys; print('seen', sys.argv[1:], os.environ['RUN_DIR'])")
    env = {"SCRIPT": str(tmp_path / "train.py"), "RUNS_DIR": str(tmp_path / "runs")}
    done = submit("single", "--name", "mine", "--sweep", "lr=1,2", "--", "--out={run_dir}", **env).wait(check=True)
    runs = [tmp_path / f"runs/mine-lr{rate}" for rate in "12"]
    seen = [line for line in done.stdout.splitlines() if line.startswith("seen ")]
    assert seen == [f"seen {[f'--out={run}', '--lr', rate]} {run}" for run, rate in zip(runs, "12", strict=True)]


def test_a_sweep_runs_point_by_point_and_one_refusal_is_not_the_end(tmp_path):
    (tmp_path / "bad/train").mkdir(parents=True)
    grid = "data=digits,imagefolder"
    options = words_for(tmp_path, "grid", "--epochs", "1", "--data-dir", str(tmp_path / "bad"))
    done = submit("single", "--sweep", grid, "--", *options).wait()
    assert done.status == 2
    table = [line.replace("|", " ").split() for line in done.stdout.splitlines()[-4:]]
    del table[1]  # Markdown's rule
    assert table[0] == ["run", "data", "world_size", "test_accuracy", "samples_per_s"]
    assert table[1][:3] == ["grid-datadigits", "digits", "1"]
    assert table[2] == ["grid-dataimagefolder", "imagefolder", "-", "-", "-"]
    assert "error: --data-dir" in done.stderr
