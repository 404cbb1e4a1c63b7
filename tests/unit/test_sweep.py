"""The grid of a sweep: its points, their order and its refusals, and the command line that sbatch files call."""

import subprocess
import sys

import pytest

from recipes.common.errors import UserError
from slurm.sweep import grid_points, main, point_argv
from tests.support import ROOT


def test_the_points_are_the_product_in_the_order_of_the_words():
    points = grid_points("lr=0.1,0.2  seed=1,2,3")
    assert [tuple(point.values()) for point in points] == [
        ("0.1", "1"), ("0.1", "2"), ("0.1", "3"), ("0.2", "1"), ("0.2", "2"), ("0.2", "3"),
    ]  # fmt: skip
    assert point_argv(points[4]) == ["--lr", "0.2", "--seed", "2"]
    assert grid_points("model=lenet") == [{"model": "lenet"}]
    assert grid_points("--global_batch_size=64") == [{"global-batch-size": "64"}]
    assert grid_points("config=a=b.yaml") == [{"config": "a=b.yaml"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "SWEEP is empty"),
        ("  ", "SWEEP is empty"),
        ("lr", "SWEEP expects options such as lr=0.1,0.2, got 'lr'"),
        ("lr=0.1 0.2", "SWEEP expects options such as lr=0.1,0.2, got '0.2'"),
        ("=1", "SWEEP expects an option's name before '=', got '=1'"),
        ("LR=1", "SWEEP expects an option's name before '=', got 'LR=1'"),
        ("lr=", "SWEEP has an empty value in 'lr='"),
        ("lr=1,,2", "SWEEP has an empty value in 'lr=1,,2'"),
        ("lr=1,", "SWEEP has an empty value in 'lr=1,'"),
        ("lr=1,1", "SWEEP has a value twice in 'lr=1,1'"),
        ("lr=1 seed=2 lr=3", "SWEEP has lr twice"),
        ("warmup-steps=1 warmup_steps=3", "SWEEP has warmup-steps twice"),
    ],
)
def test_what_makes_no_grid_is_refused(text, message):
    with pytest.raises(UserError) as caught:
        grid_points(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_command_line_needs_python_alone():
    for words, printed in (((), "4\n"), (("2",), "--lr\n0.2\n--seed\n1\n")):
        command = [sys.executable, "-S", "-m", "slurm.sweep", "lr=0.1,0.2 seed=1,2", *words]  # without packages
        assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: "),
        (["lr=1", "0", "0"], "usage: "),
        (["lr"], "SWEEP expects"),
        (["lr=1,2", "2"], "the points of 'lr=1,2' count from 0 to 1, got '2'"),
        (["lr=1,2", "-1"], "the points of 'lr=1,2' count from 0 to 1, got '-1'"),
    ],
)
def test_refusals_of_the_command_line(arguments, message, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"error: {message}")
