"""An elastic job: nodes are lost and come back, and the curve is that of an undisturbed run."""

import json
import random
import signal
import sys
import time

import pytest

from tests.support import Command, assert_same_curve, last_step, newest_checkpoint, train, words_for

pytestmark = pytest.mark.slow

GENTLE = ("--lr", "0.0005", "--seed", "1", "--deterministic", "--device", "cpu", "--epochs", "1000")
"""A rate at which a difference in the last bit stays one for hundreds of steps (at 0.002 some seeds do not)."""

OFTEN = ("--checkpoint-every", "20")
STEPS = 600


def elastic(nodes, min_nodes, max_restarts, *options, **env):
    counts = ("--nodes", str(nodes), "--min-nodes", str(min_nodes), "--max-restarts", str(max_restarts))
    return Command(sys.executable, "-m", "scripts.local", "ddp", *counts, "--", *options, **env)


def launches(run):
    path = run / "config.json"
    return json.loads(path.read_text())["launches"] if path.exists() else []


def node_of(job, number, text="-m scripts.elastic.node"):
    """Return the process of a node, or one below it."""
    [process] = [p for p in job.find(text) if p.environ().get("NODE_RANK") == str(number)]
    return process


def test_a_node_is_lost_and_comes_back(tmp_path):
    chance = random.Random(0)
    job = elastic(3, 2, 3, *words_for(tmp_path, "e", *GENTLE, *OFTEN, "--max-steps", str(STEPS)))
    run = tmp_path / "e"
    job.wait_for_step(run, chance.randrange(30, 150))
    node_of(job, chance.randrange(3)).kill()
    killed_at = time.monotonic()
    while "elastic: round 1 ended: lost node " not in job.text:
        assert time.monotonic() < killed_at + 15, job.text
        time.sleep(0.05)
    result = job.wait()
    assert result.status == 0, result.stderr
    assert result.errors == []
    assert result.stdout.splitlines()[-1].startswith("result recipe=ddp world_size=3 ")
    assert [launch["world_size"] for launch in launches(run)] == [3, 2, 3]
    whole = train("ddp", tmp_path / "whole", 3, *GENTLE, "--max-steps", str(STEPS))
    assert_same_curve(run, whole)


def test_a_signal_to_the_launcher_ends_it_with_a_checkpoint(tmp_path):
    job = elastic(2, 1, 3, *words_for(tmp_path, "s", *GENTLE, "--max-steps", "100000"))
    job.wait_for_step(tmp_path / "s", 5)
    job.process.send_signal(signal.SIGTERM)
    result = job.wait(timeout_s=60)
    assert result.status == 0, result.stderr
    assert result.errors == []
    assert "stopped by SIGTERM: wrote " in result.stdout
    assert last_step(tmp_path / "s") == newest_checkpoint(tmp_path / "s")["position"]["step"]
    assert [launch["world_size"] for launch in launches(tmp_path / "s")] == [2]
