"""An elastic job: nodes are lost and come back, and the curve is that of an undisturbed run."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from scripts.launch.local import free_port
from tests.support import (
    ROOT,
    TIMEOUT_S,
    Command,
    Interrupt,
    assert_same_curve,
    last_step,
    launches,
    newest_checkpoint,
    run_ranks,
    wait_until,
    words_for,
)

pytestmark = pytest.mark.slow

GENTLE = ("--lr", "0.0005", "--seed", "1", "--deterministic", "--device", "cpu", "--epochs", "1000")
GENTLE += ("--data", "tests.slow_data:slower_images", "--workers", "0", "--global-batch-size", "16")
"""At this rate, a difference in the last bit does not grow for hundreds of steps (at 0.002 it may).

A step sleeps 0.1 s, which leaves the cores free, unless SLOW_UNTIL names an existing file.
"""

OFTEN = ("--checkpoint-every", "20")


def elastic(nodes, min_nodes, max_restarts, *options, recipe="ddp", **env):
    counts = ("--nodes", str(nodes), "--min-nodes", str(min_nodes), "--max-restarts", str(max_restarts))
    return Command(sys.executable, "-m", "scripts.launch.local", recipe, *counts, "--", *options, **env)


def process_of(job, node, module="scripts.launch.rejoin"):
    """Return the process that runs a module on a node."""
    [process] = job.processes(f"-m {module} ", NODE_RANK=str(node))
    return process


def test_a_node_is_lost_and_comes_back_and_another_is_silent(tmp_path):
    """Node 0 is lost with all its processes, and returns later; then node 1 is suspended for good."""
    job = elastic(3, 2, 3, *words_for(tmp_path, "e", *GENTLE, *OFTEN))
    run = tmp_path / "e"
    job.wait_for_step(run, 30)
    node = process_of(job, 0)
    command, environment = node.cmdline(), node.environ()
    node.kill()
    wait_until(lambda: launches(run) == [3, 2], TIMEOUT_S, lambda: job.text)
    assert launches(run, "step")[1] >= 20
    environment["LAUNCHER_PID"] = str(os.getpid())
    returned = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        wait_until(lambda: launches(run) == [3, 2, 3], TIMEOUT_S, lambda: job.text)
        assert newest_checkpoint(run)["position"]["step"] >= launches(run, "step")[2], "no step was done twice"
        job.wait_for_step(run, launches(run, "step")[2] + 1)
        stopped = job.processes(NODE_RANK="1")
        stopped_at = time.monotonic()
        for process in stopped:
            process.suspend()
        wait_until(lambda: "silent for 7 s" in job.text, 20, lambda: job.text)
        assert time.monotonic() - stopped_at > 4, "a pause is no loss"
        wait_until(lambda: launches(run) == [3, 2, 3, 2], TIMEOUT_S, lambda: job.text)
        for process in stopped:
            process.kill()
        job.wait_for_step(run, launches(run, "step")[3] + 10)
        returned.send_signal(signal.SIGTERM)  # first: the store ends with the nodes that the job's launcher knows
        job.process.send_signal(signal.SIGTERM)
        result = job.wait(check=True)
        assert result.errors == []
        assert returned.wait(10) == 0
    finally:
        returned.kill()
    stop = Interrupt(signal.SIGTERM, last_step(run))
    words = words_for(tmp_path, "whole", *GENTLE)
    run_ranks("ddp", words, 2, tmp_path / "output", interrupt=stop, SLOW_UNTIL=str(tmp_path))
    assert_same_curve(run, tmp_path / "whole")


def test_a_rank_that_is_killed_starts_again_and_one_too_often_ends_the_job(tmp_path):
    run = tmp_path / "s"
    job = elastic(2, 1, 1, *words_for(tmp_path, "s", *GENTLE, *OFTEN, "--max-steps", "100000"))
    job.wait_for_step(run, 25)
    process_of(job, 0, "recipes.ddp.train").kill()
    wait_until(lambda: launches(run) == [2, 2], TIMEOUT_S, lambda: job.text)
    assert launches(run, "step")[1] >= 20
    job.wait_for_step(run, launches(run, "step")[1] + 1)
    process_of(job, 0, "recipes.ddp.train").kill()  # each node counts the failures of its own ranks
    result = job.wait()
    assert result.status == 1, result.stderr
    assert result.stderr.count("was killed by SIGKILL; restart 1 of at most 1") == 1
    assert result.stderr.count("was killed by SIGKILL") > 1
    assert launches(run) == [2, 2]


def test_shards_of_two_ranks_go_on_in_one(tmp_path):
    """fsdp loses a node; the other reads both nodes' shards, and writes one shard from then on."""
    sharded = (*GENTLE, *OFTEN, "--sharded-checkpoints", "--max-steps", "100000")
    run, job = tmp_path / "f", elastic(2, 1, 1, *words_for(tmp_path, "f", *sharded), recipe="fsdp")
    job.wait_for_step(run, 30)
    assert num_shards(run) == 2
    process_of(job, 1).kill()
    wait_until(lambda: launches(run) == [2, 1], TIMEOUT_S, lambda: job.text)
    assert launches(run, "step")[1] >= 20
    job.wait_for_step(run, launches(run, "step")[1] + 20)
    job.process.send_signal(signal.SIGTERM)
    result = job.wait(check=True)
    assert num_shards(run) == 1
    assert re.search("^stopped by .*: wrote ", result.stdout, re.MULTILINE)
    assert last_step(run) == newest_checkpoint(run)["position"]["step"]
    stop = Interrupt(signal.SIGTERM, last_step(run))
    words = words_for(tmp_path, "whole", *GENTLE)
    run_ranks("single", words, 1, tmp_path / "output", interrupt=stop, SLOW_UNTIL=str(tmp_path))
    assert_same_curve(run, tmp_path / "whole")


def num_shards(run):
    return len(newest_checkpoint(run)["shards"]["files"])


def test_a_refusal_ends_the_job_at_once(tmp_path):
    """torchrun itself would restart ranks that refuse their options."""
    result = elastic(2, 1, 3, *words_for(tmp_path, "f", "--global-batch-size", "0")).wait()
    assert result.status == 2, result.stderr
    assert [line for line in result.stderr.splitlines() if "error: " in line and "--global-batch-size" in line]
    assert "restart" not in result.stderr


def test_plain_torchrun_restarts_its_ranks_too(tmp_path):
    """Its agent keeps one store for all attempts, with the note that a rank hung, by which all would end again."""
    argv = (*GENTLE, *OFTEN, "--max-steps", "200", "--timeout-s", "10", "--resume", "auto")
    words = words_for(tmp_path, "e", *argv)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1")
    start = (*torchrun, f"--master-port={free_port()}", "-m", "recipes.ddp.train", *words)
    job = Command(*start, SLOW_UNTIL=str(tmp_path / "end"))
    job.wait_for_step(tmp_path / "e", 30)
    hung = job.processes(" -u -m recipes.ddp.train")[-1]
    hung.suspend()
    wait_until(lambda: "does not answer" in job.text, TIMEOUT_S, lambda: job.text)
    hung.kill()
    (tmp_path / "end").touch()
    job.wait(check=True)
    assert launches(tmp_path / "e") == [2, 2]
    assert launches(tmp_path / "e", "step")[1] >= 20
    assert last_step(tmp_path / "e") == 200
