"""The elastic job on a real Slurm: a node's step is lost and comes back; a node that Slurm has lost stays away."""

import json
import re
import sys
import time

import pytest

from tests.support import assert_same_curve, last_step, train, wait_until

pytestmark = pytest.mark.slow

GENTLE = ("--lr", "0.0005", "--seed", "1", "--deterministic", "--device", "cpu", "--epochs", "1000")
"""A rate at which a difference in the last bit stays one for hundreds of steps."""

OFTEN = ("--checkpoint-every", "20")
STEPS = 900


def launches(job):
    path = job.run / "config.json"
    return [launch["world_size"] for launch in json.loads(path.read_text())["launches"]]


def test_the_job_goes_on_without_a_node_and_takes_it_in_again(cluster, tmp_path):
    options = (*GENTLE, *OFTEN, "--log-every", "1", "--max-steps", str(STEPS))
    flags = ("--nodes=3", "--gpus-per-node=1")
    env = {"PYTHON": sys.executable, "MIN_NODES": "2", "MAX_RESTARTS": "3"}
    job = cluster.submit(tmp_path, "ddp-elastic.sbatch", *options, flags=flags, **env)
    job.wait_for_text("epoch 1 ")
    run = job.run
    wait_until(lambda: last_step(run) > 30, 60, "some steps")
    [node] = cluster.processes("-m scripts.elastic.node", "n2")
    node.kill()
    killed_at = time.monotonic()
    job.wait_for_text("elastic: round 1 ended: lost node 1 (n2)")
    assert time.monotonic() < killed_at + 15
    assert job.wait() == "COMPLETED", job.text
    # Slurm may still say of the killed step that it was aborted.
    assert re.search("^result recipe=ddp world_size=3 ", job.text, re.MULTILINE), job.text
    assert launches(job) == [3, 2, 3]
    whole = train("ddp", tmp_path / "whole", 3, *GENTLE, "--max-steps", str(STEPS))
    assert_same_curve(run, whole)


def test_a_node_that_slurm_has_lost_stays_away(cluster, tmp_path):
    flags = ("--nodes=3", "--gpus-per-node=1")
    env = {"PYTHON": sys.executable, "MIN_NODES": "2"}
    options = ("--epochs", "1000", *OFTEN)
    job = cluster.submit(tmp_path, "ddp-elastic.sbatch", *options, flags=flags, **env)
    job.wait_for_text("epoch 2 ")
    try:
        for process in [*cluster.processes("slurmd -D -N n3"), *cluster.processes(job.run.name, "n3")]:
            process.kill()
        job.wait_for_text(" world_size=2")
        assert job.field("JobState") == "RUNNING"
        cluster.run("scancel", job.number)
        assert job.wait() == "CANCELLED"
    finally:
        cluster.script("restart", "n3")
    is_idle = lambda: cluster.run("sinfo", "-h", "-n", "n3", "-p", "main", "-o", "%T").strip() == "idle"  # noqa: E731
    wait_until(is_idle, 30, "n3 idle again")
