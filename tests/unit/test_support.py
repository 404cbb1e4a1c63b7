"""The tests' own helpers: what compares runs fails where a value is not a number."""

import contextlib
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from tests.support import assert_same_curve, has_ended, largest_difference


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", range(3))
def test_a_difference_that_is_not_a_number_hides_in_no_place(value, place):
    """The difference of two infinities is NaN as well."""
    tensors = {str(i): torch.tensor([0.0, value if i == place else 1.0]) for i in range(3)}
    assert math.isnan(largest_difference(tensors, tensors))


def test_the_largest_difference_is_that_of_any_tensor():
    ours = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]], dtype=torch.bfloat16)}
    assert largest_difference(ours, ours) == 0
    assert largest_difference(ours, {**ours, "b": torch.tensor([[3.5]])}) == 0.5
    assert largest_difference(ours, {**ours, "a": torch.tensor([-1.0, 1.5])}) == 2


NO_NUMBERS = [
    (place, value, other) for place in (0, 3, 220) for value in (math.nan, math.inf) for other in (1, value)
]


@pytest.mark.parametrize(
    ("place", "ours", "theirs", "is_same"),
    [
        (0, 1, 1, True),
        (3, 1 + 2e-5, 1, False),
        (220, 1 + 2e-5, 1, True),
        (220, 1.003, 1, False),
        *((*case, False) for case in NO_NUMBERS),
    ],
)
def test_curves_are_the_same_up_to_rounding_and_where_they_are_numbers(tmp_path, place, ours, theirs, is_same):
    for name, value, steps in (("ours", ours, 230), ("whole", theirs, 240)):
        (tmp_path / name).mkdir()
        losses = [value if i == place else 1.0 for i in range(steps)]
        lines = [json.dumps({"kind": "step", "step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with contextlib.nullcontext() if is_same else pytest.raises(AssertionError):
        assert_same_curve(tmp_path / "ours", tmp_path / "whole")


def test_a_process_has_ended_when_it_is_a_zombie_and_when_it_is_gone():
    assert not has_ended(os.getpid())
    process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(process.pid)
    process.wait()
    assert has_ended(process.pid)
