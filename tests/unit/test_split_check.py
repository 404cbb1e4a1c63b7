"""What counts as the same output and gradients of a model that ranks split."""

from __future__ import annotations

import pytest
import torch

from recipes.common.models.split_check import check_same_pass
from tests.conftest import refused

WHOLE = {"": torch.tensor([1.0, -torch.inf]), "weight": torch.tensor([3.0, 4.0]), "bias": torch.zeros(2)}


def check(amp="none", **changed):
    found = {**WHOLE, **{name.replace("output", ""): torch.tensor(values) for name, values in changed.items()}}
    check_same_pass("--model mine:net: it", WHOLE, found, amp, "fix the output", "fix the gradient")


def test_rounding_and_equal_infinities_are_the_same():
    check()
    check(output=[1.001, -torch.inf], weight=[3.001, 4.0], bias=[1e-6, 0.0])
    check("bf16", weight=[3.2, 4.0])


@pytest.mark.parametrize(("amp", "same", "other"), [("none", 0.008, 0.012), ("bf16", 0.09, 0.12)])
def test_how_much_may_differ(amp, same, other):
    """The norm of the output is 1, that of the gradient 5."""
    check(amp, output=[1 + same, -torch.inf], weight=[3 + 5 * same, 4.0])
    with refused("it returns other values than whole"):
        check(amp, output=[1 + other, -torch.inf])
    with refused("it has another gradient of weight than whole"):
        check(amp, weight=[3 + 5 * other, 4.0])


@pytest.mark.parametrize(
    "weight", [[3.2, 4.0], [0.0, 0.0], [3.0, torch.nan], [3.0, torch.inf], [3.0, 4.0, 5.0]], ids=str
)
def test_another_gradient_is_named(weight):
    with refused("--model mine:net: it has another gradient of weight than whole; fix the gradient"):
        check(weight=weight)


def test_another_output_comes_first():
    with refused("--model mine:net: it returns other values than whole; fix the output"):
        check(output=[1.0, 0.0], weight=[0.0, 0.0])
    with refused("--model mine:net: it has another gradient of bias than whole"):
        check(bias=[0.1, 0.0])
