"""One run that goes from recipe to recipe: each leg resumes from the one before, in another layout."""

from __future__ import annotations

import pytest

from recipes.common.checkpoint.reading import read_checkpoint
from recipes.common.checkpoint.shard_files import read_whole
from tests.support import largest_difference, losses, metrics, train, weights

STEPS = 2
"""Steps of each leg."""
LEGS = [
    ("fsdp", 4),
    ("tensor", 4),
    ("ddp", 3),
    ("pipeline", 2, "--num-microbatches", "2"),
    ("single", 1),
    ("fsdp", 2),
]
"""Each leg's recipe, number of ranks and options; tensor's grid is 2 x 2."""


WORDS = ("--data", "text", "--seq-len", "8", "--global-batch-size", "12", "--clip-grad-norm", "1")
WORDS += ("--lr-schedule", "constant", "--device", "cpu")
"""Options of all legs: small text, 12 samples a step; GPT has packed attention and a tied matrix."""


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
def test_the_circle_of_layouts_is_one_curve(tmp_path, text, is_sharded):
    argv = (*WORDS, *text)
    whole = train("single", tmp_path, 1, *argv, "--max-steps", str(STEPS * len(LEGS)))
    found, run = {}, None
    for number, (recipe, world_size, *layout) in enumerate(LEGS, 1):
        start = ("--start-from", str(run)) if run else ()
        if is_sharded and recipe in ("fsdp", "tensor"):
            start += ("--sharded-checkpoints",)
        more = ("--max-steps", str(STEPS * number), *layout, *start)
        run = train(recipe, tmp_path / str(number), world_size, *argv, *more)
        own = {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}
        assert list(own) == [STEPS * number - 1, STEPS * number], recipe
        found |= own
    assert list(found.values()) == pytest.approx(losses(whole), rel=1e-5)
    last = read_whole(read_checkpoint(max((run / "checkpoints").glob("step-*.pt"))))
    assert largest_difference(last["model"], weights(whole)) < 1e-5
