"""The recipe as one of a thousand ranks, and the plan's bytes against the counters of real links."""

import json
import sys

import pytest

from recipes.ddp import train
from scripts.bench.plan import error_of
from scripts.plan import thousand
from scripts.plan.workload import kind_of, look_at
from tests.conftest import need_namespaces
from tests.support import Command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("words", [(), ("--grad-compression", "fp16")], ids=["plain", "fp16"])
def test_a_step_is_the_same_at_two_ranks_and_at_1024(words):
    few, many = thousand.rehearse_all([2, 1024], words)
    # The gradients, one bucket: those of LeNet for three channels of 12 pixels.
    args = train.options(["--data", "synthetic", "--image-size", "12"])
    gradients = look_at(args, kind_of(args, 1000, None)).parameter_bytes
    assert many["step_kinds"] == [["allreduce", gradients // (2 if words else 1), 1]]
    assert few["step_kinds"] == many["step_kinds"]
    # Votes, 4 bytes, go around all ranks: 1,024 have one in 16 steps, and one before the last checkpoint. The last
    # evaluation has five batches a rank with two ranks, and one with 1,024: a vote in the first of 16.
    assert few["votes"] == thousand.STEPS + 5
    assert many["votes"] == thousand.STEPS // 16 + 1 + 1
    assert few["other_collectives"] == many["other_collectives"]
    # What ranks gather from all of the others comes in setting up, at an epoch's end and in the end alone.
    assert many["other_bytes"] < few["other_bytes"] + 1024 * 1024
    assert many["printed_lines"] <= few["printed_lines"] + 10, "not a line for each of 128 nodes"
    assert many["config_bytes"] < few["config_bytes"] + 128 * 80, "a line for each of 128 nodes"
    assert many["peak_memory_bytes"] < few["peak_memory_bytes"] + 30e6


def test_the_rehearsal_refuses_in_a_line(capsys):
    for words, said in (
        (["--world-size", "0"], "expects a whole number"),
        (["--recipe", "horovod"], "--recipe: invalid choice 'horovod'"),
        (["--", "--zeroo"], "unknown option --zeroo; did you mean '--zero'?"),
        (["--", "--zero"], "--zero cannot be rehearsed"),
        (["--", "--max-steps=2"], "--max-steps is set by the rehearsal itself; leave it out of ARGS"),
    ):
        assert thousand.main(words) == 2
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert text.count("\n") == 1
        assert said in text


def test_the_plans_bytes_are_those_that_leave_a_node(tmp_path):
    """Two nodes: the model's gradients once, half of them in fp16; headers, votes and notes add a few percent."""
    need_namespaces()
    output = tmp_path / "points.json"
    words = ("--nodes", "2", "--mbit", "0", "--rounds", "1", "--steps", "6", "--compression", "none", "fp16")
    command = ("-m", "scripts.bench.plan", *words, "--model", "vit-tiny", "--result", str(output))
    result = Command(sys.executable, *command).wait(120)
    assert result.status == 0, result.stdout + result.stderr
    points = json.loads(output.read_text())
    assert [point["compression"] for point in points] == ["none", "fp16"]
    for point in points:
        print(point["predicted"], point["real"])
        assert -0.04 < error_of(point, "sent_bytes")[0] <= 0
    whole, half = (point["predicted"][0]["sent_bytes"] for point in points)
    assert whole == 2 * half > 1e6
