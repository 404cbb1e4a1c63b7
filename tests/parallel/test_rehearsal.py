"""The recipe as one of a thousand ranks: what a step sends, prints and keeps does not grow."""

import pytest

from recipes.ddp import train
from scripts.plan.workload import count_workload, kind_of
from tests import rehearsal

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("words", [(), ("--grad-compression", "fp16")], ids=["plain", "fp16"])
def test_a_step_is_the_same_at_two_ranks_and_at_1024(words):
    few, many = rehearsal.rehearse_all([2, 1024], words)
    # One bucket holds all gradients: those of LeNet for images of three channels and 12 pixels.
    args = train.options(["--data", "synthetic", "--image-size", "12"])
    gradients = count_workload(args, kind_of(args, 1000, None)).parameter_bytes
    assert many["step_kinds"] == [["allreduce", gradients // (2 if words else 1), 1]]
    assert few["step_kinds"] == many["step_kinds"]
    # Votes, 4 bytes, go around all ranks. In the last evaluation, a rank has 576 passes of two images with two
    # ranks, and two with 1,024: a vote in the first of 16. 1,024 ranks vote in their first two steps, before they
    # know how long one takes, and before the last checkpoint; in others only if a step takes over 0.3 s.
    assert few["votes"] == rehearsal.STEPS + 576
    assert 2 + 1 + 1 <= many["votes"] <= rehearsal.STEPS + 1
    assert few["other_collectives"] == many["other_collectives"]
    # Ranks gather data from all others only during setup, at the end of an epoch and at the end of the run.
    assert many["other_bytes"] < few["other_bytes"] + 1024 * 1024
    assert many["printed_lines"] <= few["printed_lines"] + 10, "not a line for each of 128 nodes"
    assert many["config_bytes"] < few["config_bytes"] + 128 * 80, "a line for each of 128 nodes"
    assert many["peak_memory_bytes"] < few["peak_memory_bytes"] + 30e6
