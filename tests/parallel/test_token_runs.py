"""Training on files of tokens: the numbers of --data text, at each number of processes, and after a stop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipes.common.data import load_data
from recipes.single.train import options
from tests.conftest import slow
from tests.support import TEXT_DIR, assert_same_training, losses, metrics, train

STEPS = ("--device", "cpu", "--seq-len", "16", "--global-batch-size", "6", "--max-steps", "6")
ALONE = ("--workers", "0")
"""Each rank reads its samples itself: else it starts a process that imports torch, and two workers."""
TEXT = ("--data", "text", "--data-dir", str(TEXT_DIR))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Write the bytes that --data text reads as tokens, in two files for training; return the options for them."""
    folder = tmp_path_factory.mktemp("tokens")
    data = load_data(options([*TEXT, *STEPS]), torch.device("cpu"), print)
    train_text, test_text = data.train.text.numpy(), data.test.text.numpy()
    cut = len(train_text) // 32 * 16  # whole windows; the token after the last one is in both files
    for name, part in (("train_1", train_text[: cut + 1]), ("train_2", train_text[cut:]), ("val", test_text)):
        part.astype(np.uint16).tofile(folder / f"{name}.bin")
    return ("--data", "tokens", "--data-dir", str(folder), "--vocab-size", "256", *STEPS)


@pytest.fixture(scope="module")
def single(tokens, tmp_path_factory):
    return train("single", tmp_path_factory.mktemp("single"), 1, *tokens, *ALONE)


def evaluations(run):
    """Return (kind, epoch, step, test_loss) of each evaluation."""
    lines = [line for line in metrics(run) if "test_loss" in line]
    names = ("kind", "epoch", "step")
    return [(*(line[name] for name in names), pytest.approx(line["test_loss"], rel=1e-5)) for line in lines]


def test_the_numbers_are_those_of_text(single, tmp_path):
    text = train("single", tmp_path, 1, *TEXT, *STEPS)
    assert losses(single) == losses(text)
    ours, theirs = metrics(single)[-1], metrics(text)[-1]
    assert ours["test_bits_per_token"] == theirs["test_bits_per_byte"]


@pytest.mark.parametrize(
    ("recipe", "world_size", "more"),
    [
        ("ddp", 3, ()),
        *slow(
            ("fsdp", 2, (*ALONE, "--sharded-checkpoints")),
            ("context", 2, ALONE),
            ("tensor", 2, ALONE),
            ("pipeline", 2, (*ALONE, "--num-microbatches", "3")),
            ("scratch", 3, ALONE),
            ("dataparallel", 1, ALONE),
        ),
    ],
)
def test_evaluations_within_an_epoch_change_nothing(tokens, single, tmp_path, recipe, world_size, more):
    """Every second step is evaluated and saved, with the averages of a run that ends there."""
    run = train(recipe, tmp_path, world_size, *tokens, *more, "--evaluate-every", "2")
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)
    short = train("single", tmp_path, 1, *tokens, *ALONE, "--max-steps", "2")
    first, second, last = evaluations(run)
    assert first[:3] == ("evaluation", 1, 2)
    assert [second[:3], last] == [("evaluation", 1, 4), *evaluations(single)]
    assert first[3] == evaluations(short)[0][3]
    names = {path.name for path in (run / "checkpoints").glob("step-*.pt")}
    assert names == {f"step-00000000{step}.pt" for step in (2, 4, 6)}


def test_a_run_goes_on_after_an_evaluation_on_other_ranks(tokens, single, tmp_path):
    """The checkpoint of step 4 lies within the first epoch, between two evaluations."""
    middle = "checkpoints/step-000000004.pt"
    tokens = (*tokens, *ALONE)
    first = train("ddp", tmp_path, 2, *tokens, "--evaluate-every", "3", "--checkpoint-every", "2")
    run = train("ddp", tmp_path, 3, *tokens, "--evaluate-every", "3", "--start-from", str(first / middle))
    assert evaluations(run) == evaluations(single)
    assert_same_training(run, single, after=4)
