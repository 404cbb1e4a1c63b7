"""submitit on a real Slurm cluster: the same training, back after a preemption, and plain words where it fails."""

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import GPU_FAULT
from tests.support import (
    ROOT,
    TIMEOUT_S,
    Command,
    is_equal,
    last_step,
    launches,
    losses,
    metrics,
    newest_checkpoint,
    run_ranks,
    train,
    wait_until,
    weights,
    words_for,
)

pytestmark = pytest.mark.slow

LONG = ("--data", "tests.slow_data:slower_images", "--global-batch-size", "16")
LONG += ("--epochs", "24", "--deterministic", "--workers", "0")
"""192 steps of 0.2 s, which leave the cores free, until go_on()."""


def go_on(folder):
    """Make the remaining steps of a LONG run take no time."""
    (folder / "end").touch()


@pytest.fixture
def submit(cluster, tmp_path):
    """Return a function that starts slurm.submit with the cluster's commands in PATH."""

    def start(*arguments, **env):
        command = [sys.executable, "-m", "slurm.submit", *arguments]
        env = {**cluster.environment, "OMP_NUM_THREADS": "1", "SLOW_UNTIL": str(tmp_path / "end"), **env}
        return Command(*command, **env, PYTHONUNBUFFERED="1")

    return start


@pytest.fixture
def submitted(submit):
    """Return a function that submits a job and follows it until it ends."""
    return lambda *arguments: submit(*arguments).wait(gone_within_s=15)


def job_id(command):
    wait_until(lambda: "\njob " in f"\n{command.text}", TIMEOUT_S, "a job's number")
    return re.search(r"^job (\d+):", command.text, re.MULTILINE)[1]


def wait_for_log(command, step, run):
    wait_until(lambda: (run / "metrics.jsonl").exists(), TIMEOUT_S, lambda: f"{run}\n{command.text}")
    command.wait_for_step(run, step)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return an uninterrupted run of two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return train("ddp", folder, 2, *LONG, SLOW_UNTIL=str(folder))


def test_map(submitted):
    done = submitted("probe", "--nodes", "2", "--nproc-per-node", "2", "--time", "5")
    assert (done.status, done.stderr) == (0, "")
    assert ": RUNNING\n" in done.stdout
    last = done.stdout.splitlines()[-1]
    content = json.loads(last.removeprefix("probe "))
    assert (content["world_size"], content["sum"]) == (4, 10)
    rows = content["ranks"]
    places = [(row["rank"], row["local_rank"], row["node_rank"]) for row in rows]
    assert places == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert {row["local_world_size"] for row in rows} == {2}
    assert len({row["host"] for row in rows}) == 2
    folder = Path(re.search(r"record (\S+),", done.stdout)[1])
    assert re.fullmatch(r"probe-\d{3}", folder.name)
    shutil.rmtree(ROOT / folder)


def check_resumed(run, undisturbed, starts):
    assert is_equal(weights(run), weights(undisturbed))
    assert losses(run) == losses(undisturbed)
    steps = launches(run, "step")
    assert (len(steps), steps[0]) == (starts, 0)
    assert steps == sorted(set(steps))
    assert steps[-1] < 192


def test_a_disturbed_job_ends_with_the_weights_of_an_undisturbed_one(cluster, submit, tmp_path, undisturbed):
    """An urgent job takes a node: signal, checkpoint, requeue. Then an operator requeues it: Slurm sends TERM.

    A third disturbance exceeds --max-requeues: the job fails, and a new job resumes.
    """
    run = tmp_path / "disturbed"
    words = words_for(tmp_path, run.name, *LONG)
    # The job takes all cores of its nodes, so that the urgent job disturbs no other job.
    shape = ("ddp", "--nodes", "2", "--cpus-per-task", "8", "--time", "5", "--max-requeues", "2")
    command = submit(*shape, "--", *words)
    wait_for_log(command, 6, run)
    node = cluster.run("squeue", "--noheader", "--jobs", job_id(command), "--format", "%B").strip()
    urgent = ("--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null")
    cluster.run("sbatch", *urgent, "--wrap=sleep 1")
    wait_until(lambda: "resumed from" in command.text, TIMEOUT_S, lambda: command.text)
    wait_for_log(command, last_step(run) + 6, run)
    cluster.run("scontrol", "requeue", job_id(command))
    wait_until(lambda: command.text.count("resumed from") == 2, TIMEOUT_S, lambda: command.text)
    wait_for_log(command, last_step(run) + 6, run)
    cluster.run("scancel", "--signal=USR1", job_id(command))
    done = command.wait(gone_within_s=15)
    assert done.status == 1, done.stdout + done.stderr
    said = ("stopped by SIGUSR1: wrote", ": requeued, start 2", "stopped by SIGTERM: wrote", ": requeued, start 3")
    said += ("it was stopped before its end, and it has started 3 times (MAX_REQUEUES=2); to resume: ",)
    places = [done.stdout.find(words) for words in said]
    assert -1 not in places
    assert places == sorted(places)
    assert re.fullmatch(r"error: job \d+ ended before the run was complete \(FAILED\); all .*", *done.errors)
    assert not (run / "result.json").exists()

    go_on(tmp_path)
    done = submit(*shape, "--", *words, "--resume", "auto").wait(gone_within_s=15)
    assert done.status == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("result recipe=ddp world_size=2 ")
    check_resumed(run, undisturbed, starts=4)


def test_a_job_goes_on_without_a_node_whose_gpu_is_broken(cluster, submit, tmp_path):
    """The node's rank fails with status 1, and rank 0, elsewhere, is killed."""
    (tmp_path / "train.py").write_text(GPU_FAULT)
    env = {"SCRIPT": str(tmp_path / "train.py"), "RUNS_DIR": str(tmp_path), "KMSG": "/dev/shm/kmsg"}
    command = submit("ddp", "--nodes", "2", "--time", "5", "--name", "mine", **env)
    try:
        done = command.wait(gone_within_s=15)
    finally:
        cluster.script("on", "n2", "rm", "-f", "/dev/shm/kmsg")
    assert done.status == 0, done.stdout + done.stderr
    job = job_id(command)
    assert f"job {job}: fault on n2, excluded from now on; it is requeued" in done.stdout
    assert f"job {job}: requeued, start 2" in done.stdout
    shown = cluster.run("scontrol", "show", "job", job)
    assert (" ExcNodeList=n2\n" in shown, " NodeList=n[1,3]\n" in shown) == (True, True), shown
    assert "Xid 79 once: fallen off the bus" in (tmp_path / "mine/slurm/excluded.txt").read_text()


def test_a_cancelled_job_writes_a_checkpoint(cluster, submit, tmp_path):
    run = tmp_path / "cancelled"
    command = submit("single", "--time", "5", "--", *words_for(tmp_path, run.name, "--epochs", "400"))
    wait_for_log(command, 20, run)
    cluster.run("scancel", job_id(command))
    done = command.wait(gone_within_s=15)
    assert done.status == 1
    assert "stopped by SIGTERM: wrote" in done.stdout
    assert "(CANCELLED)" in done.errors[0]
    assert newest_checkpoint(run)["position"]["step"] == metrics(run)[-1]["step"]


def test_ctrl_c_leaves_the_job_running(cluster, submit, tmp_path):
    (tmp_path / "train.py").write_text("import time; print('trains', flush=True); time.sleep(100)")
    env = {"SCRIPT": str(tmp_path / "train.py"), "RUNS_DIR": str(tmp_path)}
    command = submit("single", "--time", "5", "--name", "left", **env)
    wait_until(lambda: "trains\n" in command.text, TIMEOUT_S, lambda: command.text)
    job = job_id(command)
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(10) == 130
    last = command.text.splitlines()[-1]
    assert last.startswith(f"job {job} continues; to follow it: tail -n +1 -F ")
    assert last.endswith(f"to cancel it: scancel {job}")
    assert cluster.run("squeue", "--noheader", "--jobs", job, "--format", "%T").strip() == "RUNNING"
    cluster.run("scancel", job)
    command.wait(gone_within_s=15)


def test_a_sweep_is_an_array_with_a_table_at_its_end(submitted, tmp_path):
    options = words_for(tmp_path, "grid", "--epochs", "1")
    done = submitted("single", "--time", "5", "--sweep", "lr=0.02,0.05", "--", *options)
    assert done.status == 0, done.stdout + done.stderr
    table = [line.replace("|", " ").split() for line in done.stdout.splitlines()[-4:]]
    del table[1]  # Markdown's rule
    assert table[0] == ["run", "lr", "world_size", "test_accuracy", "samples_per_s"]
    for row, value in zip(table[1:], ("0.02", "0.05"), strict=True):
        run = tmp_path / row[0]
        assert row[:3] == [f"grid-lr{value}", value, "1"]
        assert row[3] == f"{json.loads((run / 'result.json').read_text())['test_accuracy']:.4g}"
        assert json.loads((run / "config.json").read_text())["options"]["lr"] == float(value)
    run_ranks("single", words_for(tmp_path, "alone", "--epochs", "1", "--lr", "0.05"), 1, tmp_path / "out")
    assert losses(tmp_path / "grid-lr0.05") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--partition", "nope"], "error: Slurm refuses the job: invalid partition specified: nope; "),
        (["--nodes", "50"], "error: Slurm refuses the job: allocation failure: "),
        (["--gpus-per-node", "50"], "error: Slurm refuses the job: allocation failure: "),
    ],
)
def test_what_slurm_cannot_give_is_refused_before_it_is_queued(submitted, tmp_path, arguments, message):
    done = submitted("ddp", *arguments, "--", "--runs-dir", str(tmp_path / "runs"))
    assert (done.status, done.stdout) == (2, "")
    assert [line.startswith(message) for line in done.stderr.splitlines()] == [True], done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_job_that_lacks_a_drained_node_is_queued_and_an_impossible_one_is_not(cluster, submitted, tmp_path):
    words = ("--time", "5", "--no-follow", "--", "--runs-dir", str(tmp_path / "runs"))
    cluster.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test")
    try:
        done = submitted("ddp", "--nodes", "3", *words)
        assert done.status == 0, done.stderr
        assert done.stderr.startswith("warning: the job may have to wait: allocation failure: ")
        assert done.stderr.endswith("; 1 node is down or drained, see sinfo --list-reasons\n")
        job = re.search(r"^job (\d+):", done.stdout, re.MULTILINE)[1]
        assert cluster.run("squeue", "--noheader", "--jobs", job, "--format", "%T").strip() == "PENDING"
        cluster.run("scancel", job)
        done = submitted("ddp", "--gpus-per-node", "50", *words)
        assert (done.status, done.stdout) == (2, ""), done.stderr
        assert done.errors[-1].startswith("error: Slurm refuses the job: ")
    finally:
        cluster.run("scontrol", "update", "NodeName=n3", "State=RESUME")
        cluster.wait_for_idle("n3")


def test_a_refusal_by_the_recipe_is_status_2(submitted, tmp_path):
    options = words_for(tmp_path, "refused", "--data", "imagefolder", "--data-dir", "/nowhere")
    done = submitted("ddp", "--nodes", "2", "--time", "5", "--", *options)
    assert done.status == 2, done.stdout + done.stderr
    assert "error: --data-dir: cannot read /nowhere/train" in done.stdout
    [error] = done.errors
    assert "was refused by the recipe; all ranks' logs: " in error
