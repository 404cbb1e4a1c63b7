"""The recipe as one of a thousand ranks, and the plan's bytes against the counters of real links."""

import json
import multiprocessing
import sys

import pytest

from scripts.plan.check import error_of, network
from scripts.plan.thousand import rehearse
from tests.conftest import require
from tests.support import Command, run_command

_context = multiprocessing.get_context("forkserver")


def _rehearse(world_size, words, folder, queue):
    queue.put(rehearse(world_size, words, folder))


def rehearsed(tmp_path, words, *world_sizes):
    """Return the figures of each world size, from processes of their own."""
    found = []
    for world_size in world_sizes:
        queue = _context.SimpleQueue()
        process = _context.Process(target=_rehearse, args=(world_size, words, tmp_path / str(world_size), queue))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        found.append(queue.get())
    return found


@pytest.mark.parametrize("words", [(), ("--zero",), ("--grad-compression", "fp16")], ids=["plain", "zero", "fp16"])
def test_a_step_is_the_same_at_two_ranks_and_at_1024(tmp_path, words):
    few, many = rehearsed(tmp_path, [*words], 2, 1024)
    if not words:
        # The vote, 4 bytes, and LeNet's gradients for three channels of 12 pixels, one bucket.
        [vote, gradients] = many["step_kinds"]
        assert vote == ["allreduce", 4, 1]
        assert gradients[0] == "allreduce"
        assert gradients[2] == 1
    if words != ("--zero",):  # which hands weights out in as many parts as there are ranks to have some
        assert few["step_kinds"] == many["step_kinds"]
    assert few["other_collectives"] == many["other_collectives"]
    # What ranks gather from all of the others comes in setting up, at an epoch's end and in the end alone.
    assert many["other_bytes"] < few["other_bytes"] + 1024 * 1024
    assert many["printed_lines"] <= few["printed_lines"] + 10, "not a line for each of 128 nodes"
    assert many["config_bytes"] < few["config_bytes"] + 128 * 80, "a line for each of 128 nodes"
    assert many["peak_memory_bytes"] < few["peak_memory_bytes"] + 30e6


def test_the_rehearsal_refuses_in_a_line():
    for words, said in (
        (["--world-size", "0"], "wants a whole number"),
        (["--recipe", "horovod"], "--recipe: does not know 'horovod'"),
        (["--", "--zeroo"], "unknown option --zeroo; did you mean '--zero'?"),
    ):
        result = run_command(sys.executable, "-m", "scripts.plan.thousand", *words)
        assert result.status == 2
        assert len(result.errors) == 1
        assert said in result.errors[0]


@pytest.mark.parametrize("kind", ["none", "fp16"])
def test_the_plans_bytes_are_those_that_leave_a_node(tmp_path, kind):
    """Two nodes: the model's gradients once, half of them in fp16; headers and votes add a percent at most."""
    require("netns", not network.why_not(), network.why_not(), "run `make test` as root")
    output = tmp_path / "points.json"
    words = ("--nodes", "2", "--mbit", "0", "--rounds", "1", "--steps", "6", "--compression", kind)
    result = Command(sys.executable, "-m", "scripts.plan.check", *words, "--output", str(output)).wait(120)
    assert result.status == 0, result.stdout + result.stderr
    [point] = json.loads(output.read_text())
    assert point["real"][0]["sent_bytes"] > 1e6
    assert -0.02 < error_of(point, "sent_bytes")[0] <= 0
