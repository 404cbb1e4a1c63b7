"""A loss that is not finite, on one rank: all stop after the same step, or all leave that step out."""

import json
import re
import signal

import pytest
import torch

from recipes.common.checkpoint import read_checkpoint
from recipes.common.data import load_data
from recipes.common.models import build_model
from recipes.common.seeding import permutation
from recipes.single import train as single
from tests.support import (
    Interrupt,
    Ranks,
    is_equal,
    largest_difference,
    metrics,
    newest_checkpoint,
    weights,
    words_for,
)

WORDS = ("--max-steps", "30", "--seed", "1", "--deterministic", "--device", "cpu", "--checkpoint-every", "1")
BAD = 13


def spoilt(recipe, folder, world_size, where, ranks, *argv, name="run"):
    """Train with a fault at step BAD; return what the ranks did, and the run."""
    fault = Interrupt(signal.SIGCONT, BAD, ranks, where)
    words = words_for(folder, name, *WORDS, *argv)
    return Ranks(recipe, words, world_size, folder / f"out-{name}", interrupt=fault).wait(60), folder / name


@pytest.mark.parametrize(
    ("recipe", "world_size", "victims"),
    [("ddp", 3, [1]), ("scratch", 2, [0, 1]), ("single", 1, [0]), ("apex", 2, [1]), ("pipeline", 2, None)],
)
def test_stop_names_step_and_ranks_and_saves_nothing_bad(tmp_path, recipe, world_size, victims):
    outcome, run = spoilt(recipe, tmp_path, world_size, "loss", victims)
    assert set(outcome.statuses) == {1}, outcome.text
    names = {"ddp": " on rank 1", "apex": " on rank 1", "scratch": " on ranks 0, 1"}.get(recipe, "")
    step = (
        rf"the loss of step {BAD} is not finite{names}"
        if recipe != "pipeline"
        else r"the loss of step \d+ is not finite"
    )
    assert re.search(f"^error: {step}", outcome.outputs[0], re.MULTILINE), outcome.text
    assert outcome.text.count("error: ") == 1
    content = newest_checkpoint(run)
    last = content["position"]["step"]
    assert last == (BAD - 1 if recipe != "pipeline" else last)
    assert all(tensor.isfinite().all() for tensor in content["model"].values())
    assert max(line["step"] for line in metrics(run)) - last == 1
    assert [line["loss"] is None for line in metrics(run)] == [False] * last + [True]


@pytest.mark.parametrize(
    ("recipe", "world_size", "victims"), [("ddp", 3, [2]), ("scratch", 2, [1]), ("single", 1, [0])]
)
def test_skip_equals_a_run_in_which_that_step_was_left_out(tmp_path, recipe, world_size, victims):
    outcome, run = spoilt(recipe, tmp_path, world_size, "loss", victims, "--on-nonfinite", "skip")
    assert set(outcome.statuses) == {0}, outcome.text
    assert f"warning: left step {BAD} out: " in outcome.outputs[0]
    _, other = spoilt(recipe, tmp_path, world_size, "optimizer_step", None, name="other")
    ours, theirs = newest_checkpoint(run), newest_checkpoint(other)
    for part in ("model", "optimizer", "position"):
        assert is_equal(ours[part], theirs[part]), part
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line.get("skipped_steps", 0) for line in lines] == [0] * (BAD - 1) + [1] * (31 - BAD)
    expected = [line["loss"] for line in metrics(other) if "loss" in line]
    assert [line["loss"] for line in lines] == [*expected[: BAD - 1], None, *expected[BAD:]]


def test_all_ranks_keep_equal_weights_after_a_skip(tmp_path):
    """DDP compares no weights: a rank that stepped alone would go on with others, and the curves would part."""
    outcome, run = spoilt("ddp", tmp_path, 2, "loss", [1], "--on-nonfinite", "skip")
    assert set(outcome.statuses) == {0}, outcome.text
    _, single = spoilt("single", tmp_path, 1, "loss", [0], "--on-nonfinite", "skip", name="single")
    assert largest_difference(weights(run), weights(single)) < 1e-5


def test_a_loss_that_stays_bad_ends_a_run_that_skips(tmp_path):
    """Once the weights are at fault, every step is."""
    argv = ("--on-nonfinite", "skip", "--lr", "1e30", "--warmup-steps", "0")
    outcome = Ranks("ddp", words_for(tmp_path, "run", *WORDS, *argv), 2, tmp_path / "out").wait(60)
    assert set(outcome.statuses) == {1}, outcome.text
    assert "; so were the 10 before it" in outcome.outputs[0]


def test_fp16_keeps_the_ways_of_its_scaler(tmp_path):
    """Gradients that overflow are what a loss scale is for; only a loss is looked at, where it is logged."""
    outcome, run = spoilt("ddp", tmp_path, 2, "loss", [1], "--amp", "fp16", "--on-nonfinite", "skip")
    assert set(outcome.statuses) == {0}, outcome.text
    assert "warning" not in outcome.text
    outcome, run = spoilt("ddp", tmp_path, 2, "loss", [1], "--amp", "fp16", name="stop")
    assert set(outcome.statuses) == {1}, outcome.text
    assert newest_checkpoint(run)["position"]["step"] == BAD - 1


def test_the_pipeline_refuses_to_skip(tmp_path):
    words = words_for(tmp_path, "run", *WORDS, "--on-nonfinite", "skip")
    outcome = Ranks("pipeline", words, 2, tmp_path / "out").wait(60)
    assert set(outcome.statuses) == {2}
    assert "error: --on-nonfinite skip: a stage sees its own gradients only; use stop" in outcome.text


@pytest.mark.parametrize(
    ("recipe", "world_size", "argv"),
    [
        ("ddp", 2, ("--optimizer", "adamw")),
        ("scratch", 2, ()),
        ("single", 1, ()),
        ("apex", 2, ("--opt-level", "O2")),
    ],
)
def test_rollback_takes_the_weights_of_the_last_checkpoint(tmp_path, recipe, world_size, argv):
    """With a checkpoint every 5 steps, those after step 10 are undone at step 13, and training goes on with 14."""
    argv = ("--on-nonfinite", "rollback", "--checkpoint-every", "5", "--keep-checkpoints", "9", *argv)
    outcome, run = spoilt(recipe, tmp_path, world_size, "loss", None, *argv)
    assert set(outcome.statuses) == {0}, outcome.text
    line = (
        f"warning: left step {BAD} out: its loss or gradient is not finite; the weights are those of step 10 again"
    )
    assert line in outcome.outputs[0]
    lines = {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}
    _, other = spoilt(recipe, tmp_path, world_size, "optimizer_step", None, *argv, name="other")
    theirs = {line["step"]: line["loss"] for line in metrics(other) if "loss" in line}
    assert [lines[step] == theirs[step] for step in (11, 12, 14)] == [True, True, False]
    # Step 14 is that of the weights of step 10.
    expected = loss_of(run, recipe, 10, 14)
    assert lines[14] == pytest.approx(expected, rel=1e-2 if recipe == "apex" else 1e-4)


def loss_of(run, recipe, step, batch):
    """Return the loss that the weights after a step have on a later step's batch."""
    config = json.loads((run / "config.json").read_text())["options"]
    args = single.options(["--seed", str(config["seed"])])
    data = load_data(args, torch.device("cpu"), on_bad_image=pytest.fail)
    model = build_model(args, data)
    model.load_state_dict(read_checkpoint(run / f"checkpoints/step-{step:09d}.pt")["model"])
    size = args.global_batch_size
    indices = permutation(len(data.train), args.seed, 0)[(batch - 1) * size : batch * size]
    [(images, labels)] = list(data.train.batches([indices], 0))
    return torch.nn.functional.cross_entropy(model(images), labels).item()


def test_rollback_gives_up(tmp_path):
    argv = ("--on-nonfinite", "rollback", "--lr", "1e30", "--warmup-steps", "0")
    outcome = Ranks("ddp", words_for(tmp_path, "run", *WORDS, *argv), 2, tmp_path / "out").wait(60)
    assert set(outcome.statuses) == {1}, outcome.text
    assert "; rolled back 10 times before it" in outcome.outputs[0]
