"""A loss that is not finite, on one rank: all stop after the same step, or all leave that step out."""

import re
import signal

import pytest

from tests.conftest import slow
from tests.support import Interrupt, is_equal, metrics, newest_checkpoint, start_run

WORDS = ("--max-steps", "30", "--seed", "1", "--deterministic", "--device", "cpu", "--checkpoint-every", "1")
BAD = 13


def spoilt(recipe, folder, world_size, where, ranks, *argv, name="run"):
    """Train with a fault at step BAD; return the Outcome and the run."""
    fault = Interrupt(signal.SIGCONT, BAD, ranks, where)
    job = start_run(recipe, folder, world_size, *WORDS, *argv, name=name, interrupt=fault)
    return job.wait(), folder / name


@pytest.mark.parametrize(
    ("recipe", "world_size", "victims"),
    [
        ("ddp", 3, [1]),
        ("scratch", 2, [0, 1]),
        ("single", 1, [0]),
        ("pipeline", 2, None),
        *slow(("apex", 2, [1]), ("fsdp", 2, [1]), ("tensor", 2, [1])),
    ],
)
def test_stop_names_step_and_ranks_and_saves_nothing_bad(tmp_path, recipe, world_size, victims):
    outcome, run = spoilt(recipe, tmp_path, world_size, "loss", victims)
    assert set(outcome.statuses) == {1}, outcome.text
    names = {"scratch": " on ranks 0, 1", "single": "", "pipeline": ""}.get(recipe, " on rank 1")
    step = BAD if recipe != "pipeline" else r"\d+"
    error = f"^error: the loss of step {step} is not finite{names}"
    assert re.search(error, outcome.outputs[0], re.MULTILINE), outcome.text
    assert outcome.text.count("error: ") == 1
    content = newest_checkpoint(run)
    last = content["position"]["step"]
    assert last == (BAD - 1 if recipe != "pipeline" else last)
    assert all(tensor.isfinite().all() for tensor in content["model"].values())
    assert max(line["step"] for line in metrics(run)) - last == 1
    assert [line["loss"] is None for line in metrics(run)] == [False] * last + [True]


@pytest.mark.parametrize(
    ("recipe", "world_size", "victims"),
    [("ddp", 3, [2]), ("single", 1, [0]), *slow(("fsdp", 2, [1]), ("tensor", 2, [1]), ("scratch", 2, [1]))],
)
def test_skip_equals_a_run_in_which_that_step_was_left_out(tmp_path, recipe, world_size, victims):
    outcome, run = spoilt(recipe, tmp_path, world_size, "loss", victims, "--on-nonfinite", "skip")
    assert set(outcome.statuses) == {0}, outcome.text
    assert f"warning: skipped step {BAD}: " in outcome.outputs[0]
    _, other = spoilt(recipe, tmp_path, world_size, "optimizer_step", None, name="other")
    ours, theirs = newest_checkpoint(run), newest_checkpoint(other)
    for part in ("model", "optimizer", "position"):
        assert is_equal(ours[part], theirs[part]), part
    assert (ours["skipped_steps"], theirs["skipped_steps"]) == (1, 0)
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line.get("skipped_steps", 0) for line in lines] == [0] * (BAD - 1) + [1] * (31 - BAD)
    expected = [line["loss"] for line in metrics(other) if "loss" in line]
    assert [line["loss"] for line in lines] == [*expected[: BAD - 1], None, *expected[BAD:]]


@pytest.mark.slow
def test_a_loss_that_stays_bad_ends_a_run_that_skips(tmp_path):
    """Once the weights are bad, every step is."""
    argv = ("--on-nonfinite", "skip", "--lr", "1e30", "--warmup-steps", "0")
    outcome = start_run("ddp", tmp_path, 2, *WORDS, *argv).wait()
    assert set(outcome.statuses) == {1}, outcome.text
    assert "; so were the 10 before it" in outcome.outputs[0]


@pytest.mark.slow
def test_fp16_keeps_the_ways_of_its_scaler(tmp_path):
    """A loss scale handles gradients that overflow, so only a loss is checked, when it is logged."""
    argv = ("--amp", "fp16", "--on-nonfinite", "skip", "--warmup-steps", "1")
    outcome, run = spoilt("ddp", tmp_path, 2, "loss", [1], *argv)
    assert set(outcome.statuses) == {0}, outcome.text
    assert "warning" not in outcome.text
    outcome, run = spoilt("ddp", tmp_path, 2, "loss", [1], "--amp", "fp16", name="stop")
    assert set(outcome.statuses) == {1}, outcome.text
    assert newest_checkpoint(run)["position"]["step"] == BAD - 1


def test_fp16_ends_once_its_scale_has_collapsed(tmp_path):
    """GradScaler skips every step silently, and its scale of 2^16 is below 1 after 17 steps."""
    argv = (*WORDS, "--checkpoint-every", "0", "--amp", "fp16")
    fault = Interrupt(signal.SIGCONT, 0, [1], "gradient")
    outcome = start_run("ddp", tmp_path, 2, *argv, interrupt=fault).wait()
    assert outcome.statuses == [1, 1], outcome.text
    [line] = outcome.errors
    assert line.startswith("error: a gradient of step 17 is not finite; the loss scale has collapsed to 0.5, so ")
    assert line in outcome.outputs[0]
    assert not list((tmp_path / "run/checkpoints").glob("*.pt"))


def test_the_pipeline_refuses_to_skip(tmp_path):
    refusal = start_run("pipeline", tmp_path, 2, *WORDS, "--on-nonfinite", "skip").wait().refusal
    assert "error: --on-nonfinite skip: a stage sees its own gradients only; use stop" in refusal
