"""Both backends on a GPU, in float16: the numbers of the one-process run to what rounding explains."""

import importlib.util

import pytest
import torch

from recipes.apex import train as recipe
from tests.conftest import need_gpus, require
from tests.support import (
    FIRST_STEP_LEFT_OUT,
    largest_difference,
    losses,
    newest_checkpoint,
    run_ranks,
    train,
    weights,
)

U = torch.finfo(torch.float16).eps / 2
FLAGS = ("--deterministic", "--no-tf32")
STEPS = ("--max-steps", "20", "--seed", "1", "--warmup-steps", "1", "--checkpoint-every", "10", *FLAGS)
BACKENDS = ("torch", "apex")


def require_backend(backend):
    need_gpus()
    if backend == "apex":
        world = recipe.World(0, 1, torch.device("cuda", 0), None, None)
        why = recipe.why_not_apex(recipe.options([]), world)
        remedy = ".venv/bin/pip install --no-build-isolation git+https://github.com/NVIDIA/apex@25.05"
        require("apex", not why, why, remedy)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Return the run of single that each level follows. O1 and O2, which scale the loss, leave out step 1."""
    need_gpus()
    plain = train("single", tmp_path_factory.mktemp("single"), 1, *STEPS)
    scaled = train("single", tmp_path_factory.mktemp("scaled"), 1, *STEPS, interrupt=FIRST_STEP_LEFT_OUT)
    return {"O0": plain, "O1": scaled, "O2": scaled, "O3": plain}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_levels_follow_single(references, tmp_path, backend, level):
    require_backend(backend)
    run = train("apex", tmp_path, 1, "--opt-level", level, "--amp-backend", backend, *STEPS)
    # There are 15 roundings between an image and its logits (see the CPU tests). O3 also rounds all 20 updates.
    roundings = {"O0": 0, "O1": 15, "O2": 15, "O3": 15 + 20}[level]
    assert losses(run) == pytest.approx(losses(references[level]), rel=max(1e-5, roundings * U))
    assert all(t.dtype == torch.float32 for t in weights(run).values() if t.is_floating_point())
    scaler = newest_checkpoint(run)["scaler"]
    assert scaler.get("scale") == (2**15 if level in ("O1", "O2") else None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_resume_is_exact(tmp_path, backend, level):
    require_backend(backend)
    words = ("--opt-level", level, "--amp-backend", backend, *STEPS)
    run = train("apex", tmp_path, 1, *words)
    middle = run / "checkpoints" / "step-000000010.pt"
    resumed = train("apex", tmp_path / "resumed", 1, *words, "--start-from", str(middle))
    assert largest_difference(weights(resumed), weights(run)) == 0
    assert newest_checkpoint(resumed)["scaler"] == newest_checkpoint(run)["scaler"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_checkpoints_pass_between_backends(tmp_path, level):
    require_backend("apex")
    words = ("--opt-level", level, *STEPS)
    for first, second in (BACKENDS, BACKENDS[::-1]):
        run = train("apex", tmp_path / first, 1, *words, "--amp-backend", first)
        middle = run / "checkpoints" / "step-000000010.pt"
        resume = ("--amp-backend", second, "--start-from", str(middle))
        other = train("apex", tmp_path / second / "to", 1, *words, *resume)
        assert newest_checkpoint(other)["scaler"] == newest_checkpoint(run)["scaler"]
        assert largest_difference(weights(other), weights(run)) < 30 * U


def test_auto_takes_apex_where_it_is(tmp_path):
    need_gpus()

    has_apex = importlib.util.find_spec("apex.amp") is not None if importlib.util.find_spec("apex") else False
    words = ["--max-steps", "1", "--no-tensorboard", "--runs-dir", str(tmp_path)]
    text = run_ranks("apex", words, 1, tmp_path / "auto").text
    assert ("by apex.amp" if has_apex else "by torch.amp") in text
