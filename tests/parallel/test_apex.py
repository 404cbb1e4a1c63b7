"""The four levels against the one-process run, to what rounding explains, and apex's own calls on a stand-in.

u = 2^-8 is the largest relative error of one rounding to bfloat16 (half of its epsilon, 2^-7). LeNet has 5
layers. Each rounds its input, its weights and its output: 15 roundings lie between an image and its logits.
Backward does the same to the gradients: 30 lie on the way to an update. The tolerances are the worst case, in
which all of them err in the same direction.
"""

import functools
import json
import math
import os
import signal
import sys
import types
from pathlib import Path

import pytest
import torch

from recipes.apex import train as recipe
from recipes.common.checkpoint.checkpoint import CheckpointFolder
from recipes.common.data import load_data
from recipes.common.errors import UserError
from recipes.common.models.models import build_model
from tests import support
from tests.support import (
    Interrupt,
    Ranks,
    largest_difference,
    losses,
    newest_checkpoint,
    run_ranks,
    train,
    weights,
    words_for,
)

U = torch.finfo(torch.bfloat16).eps / 2
LOSS_TOLERANCE = 15 * U  # 0.059
UPDATE_TOLERANCE = 30 * U  # 0.117

NUM_STEPS = 20
STEPS = ("--max-steps", str(NUM_STEPS), "--seed", "1", "--warmup-steps", "1", "--checkpoint-every", "10")


@pytest.fixture(scope="module")
def apex(tmp_path_factory):
    """Return a function that returns the recipe's run at a level and world size; each is trained once."""
    folder = tmp_path_factory.mktemp("apex")
    run = functools.cache(lambda level, n: train("apex", folder / level, n, "--opt-level", level, *STEPS))
    return lambda level, world_size=2: run(level, world_size)


def first_weights():
    args = recipe.options(["--seed", "1"])
    return build_model(args, load_data(args, torch.device("cpu"), print)).state_dict()


def relative_update_error(run, reference):
    """Return how far the updates of all steps are from the reference's, relative to their norm."""
    first, ours, theirs = first_weights(), weights(run), weights(reference)
    error = sum(float((ours[name] - theirs[name]).norm() ** 2) for name in first)
    update = sum(float((theirs[name] - first[name]).norm() ** 2) for name in first)
    return math.sqrt(error / update)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fp32_weights_follow_single_to_rounding(single, apex, level):
    assert losses(apex(level)) == pytest.approx(losses(single), rel=LOSS_TOLERANCE)
    assert losses(apex(level)) != losses(single)  # something is rounded
    assert relative_update_error(apex(level), single) < UPDATE_TOLERANCE


def test_half_weights_lose_at_most_a_rounding_a_step(single, apex):
    # Each step rounds each weight once more, by at most u times its size; small updates vanish altogether.
    largest = max(float(tensor.abs().max()) for tensor in weights(single).values())
    assert largest_difference(weights(apex("O3")), weights(single)) < (NUM_STEPS + 1) * U * largest
    assert all(tensor.dtype == torch.float32 for tensor in weights(apex("O3")).values())
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights(apex("O3")).values())


def test_o2_is_o1_where_there_is_no_batch_norm(apex):
    # Both round the same numbers at the same places: autocast rounds fp32 weights, O2 keeps rounded weights.
    assert losses(apex("O2", 1)) == losses(apex("O1", 1))
    assert largest_difference(weights(apex("O2", 1)), weights(apex("O1", 1))) == 0


@pytest.mark.parametrize("world_size", [2, 4])
def test_o1_is_the_same_at_any_world_size(apex, world_size):
    assert losses(apex("O1", world_size)) == pytest.approx(losses(apex("O1", 1)), rel=LOSS_TOLERANCE)
    assert relative_update_error(apex("O1", world_size), apex("O1", 1)) < UPDATE_TOLERANCE


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_resume_is_exact(apex, tmp_path, level):
    whole = apex(level)
    middle = whole / "checkpoints" / "step-000000010.pt"
    resumed = train("apex", tmp_path, 2, "--opt-level", level, *STEPS, "--start-from", str(middle))
    assert largest_difference(weights(resumed), weights(whole)) == 0
    assert losses(resumed, after=10) == losses(whole)[10:]


def test_checkpoints_pass_to_ddp_and_back(apex, single, tmp_path):
    middle = apex("O2") / "checkpoints" / "step-000000010.pt"
    ddp = train("ddp", tmp_path, 2, *STEPS, "--start-from", str(middle))
    assert relative_update_error(ddp, single) < UPDATE_TOLERANCE
    back = single / "checkpoints" / "step-000000010.pt"
    o0 = train("apex", tmp_path, 2, "--opt-level", "O0", *STEPS, "--start-from", str(back))
    assert largest_difference(weights(o0), weights(single)) < 1e-5


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_numbers_that_half_precision_does_not_have_are_refused(level):
    """A rotary embedding's table, for example: Module.to() would drop the imaginary parts."""
    model = torch.nn.Linear(1, 1)
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UserError, match=rf"^--opt-level {level}: turns of --model lenet is complex, .*use O0 or"):
        recipe.check_halves(model, recipe.options(["--opt-level", level]))
    recipe.check_halves(model, recipe.options(["--opt-level", "O1"]))
    recipe.check_halves(torch.nn.Linear(1, 1), recipe.options(["--opt-level", level]))


class CastsInputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm2d(1), torch.nn.Linear(64, 10)

    def forward(self, images):
        return self.linear(self.norm(images).flatten(1).float())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_model_that_casts_to_fp32_is_refused(level):
    args = recipe.options(["--opt-level", level, "--model", "mine:net"])
    data = types.SimpleNamespace(examples=lambda count: (torch.ones(count, 1, 8, 8), torch.zeros(count)))
    world = recipe.World(0, 1, torch.device("cpu"), None, None)
    what = rf"^--opt-level {level}: --model mine:net fails in half precision: RuntimeError: .*; cast to the dtype"
    with pytest.raises(UserError, match=what):
        recipe.check_half_pass(CastsInputs(), args, world, data)
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10))
    recipe.check_half_pass(model, args, world, data)
    assert all(module.training for module in model.modules())


def test_it_says_what_runs_and_refuses_what_cannot(tmp_path):
    words = ["--max-steps", "1", "--no-tensorboard", "--runs-dir", str(tmp_path)]
    text = run_ranks("apex", words, 2, tmp_path / "auto").text
    assert "O1 by torch.amp: bfloat16 per operation over fp32 weights, no loss scale (apex.amp takes CUDA" in text
    outcome = Ranks("apex", [*words, "--amp-backend", "apex"], 2, tmp_path / "apex").wait()
    assert "use --amp-backend torch" in outcome.refusal
    assert len(outcome.text.splitlines()) == 1
    with pytest.raises(UserError, match="only --opt-level sets the precision; drop --amp"):
        recipe.options(["--amp", "bf16"])


def on_gpu():
    return recipe.World(0, 1, torch.device("cuda", 0), None, None)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "no apex.amp is installed"),
        ({"apex/__init__.py": "raise SystemExit"}, "no apex.amp is installed"),
        ({"apex/__init__.py": "", "apex/amp/__init__.py": "import amp_C_is_not_here"}, "does not import"),
        ({"apex/__init__.py": "", "apex/amp/__init__.py": "", "apex/parallel/__init__.py": ""}, ""),
    ],
)
def test_apex_is_recognised(tmp_path, monkeypatch, files, reason):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    why = recipe.why_not_apex(recipe.options([]), on_gpu())
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
    assert reason in why
    assert bool(reason) == bool(why)


def use_stand_in():
    """Make this process import the stand-in as apex."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "stand_in"))
    recipe.why_not_apex = lambda args, world: ""


FIRST_SCALE = 2.0**8


def use_float16():
    """Make this process compute on the CPU in float16, as on a GPU, only slower."""
    recipe.half_type = lambda device: torch.float16
    # GradScaler's usual 2^16 is too large for the first steps here: they would be skipped.
    torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=FIRST_SCALE)


def use_plain_torch():
    """Change nothing."""


def note_events(change, folder):
    """Change this rank, and make it write the calls that the stand-in has recorded at its end."""
    change()
    main = recipe.main

    def noting(argv):
        try:
            return main(argv)
        finally:
            events = sys.modules["apex"].EVENTS if "apex" in sys.modules else []
            (folder / f"events{os.environ['RANK']}.json").write_text(json.dumps(events))

    recipe.main = noting


def train_changed(change, folder, name, world_size, *argv, status=0, interrupt=None):
    """Train with a changed recipe; return the run's folder and rank 0's calls to the stand-in."""
    setup = functools.partial(note_events, change, folder)
    words = words_for(folder, name, *argv)
    outcome = Ranks("apex", words, world_size, folder, interrupt=interrupt, setup=setup).wait()
    assert outcome.statuses == [status] * world_size, outcome.text
    return folder / name, json.loads((folder / "events0.json").read_text())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_apex_is_called_as_it_expects(apex, tmp_path, level):
    # Two parameter groups: apex yields the masters group by group.
    words = ("--opt-level", level, "--accumulate-steps", "2", "--no-decay-norm-bias", *STEPS)
    run, events = train_changed(use_stand_in, tmp_path, "whole", 2, *words)
    assert "by apex.amp" in (tmp_path / "rank0.txt").read_text()
    assert events[:2] == [f"initialize {level}", "DistributedDataParallel"]
    # The first pass of each step exchanges nothing and stays scaled; the second averages and unscales the sum.
    step = ["disable_allreduce", "scale_loss delay_unscale=True", "scale_loss delay_unscale=False"]
    assert [event for event in events[2:] if event != "state_dict"] == step * NUM_STEPS
    # apex's masters begin at the rounded weights, so the updates equal those of torch's O2 up to rounding.
    assert losses(run) == pytest.approx(losses(apex(level)), rel=LOSS_TOLERANCE)
    content = newest_checkpoint(run)
    assert content["scaler"]["scale"] == 2.0**16
    assert content["scaler"]["_growth_tracker"] == NUM_STEPS
    torch.amp.GradScaler("cpu").load_state_dict(content["scaler"])
    assert any(not torch.equal(t, t.bfloat16().float()) for t in content["model"].values())  # the masters

    middle = run / "checkpoints" / "step-000000010.pt"
    resumed, events = train_changed(use_stand_in, tmp_path, "resumed", 2, *words, "--start-from", str(middle))
    assert "load_state_dict" in events
    assert largest_difference(weights(resumed), weights(run)) == 0
    assert newest_checkpoint(resumed)["scaler"] == content["scaler"]


def test_float16_is_scaled_and_the_scale_is_kept(single, tmp_path):
    u = torch.finfo(torch.float16).eps / 2
    words = ("--opt-level", "O2", *STEPS)
    run, _ = train_changed(use_float16, tmp_path, "whole", 1, *words)
    assert losses(run) == pytest.approx(losses(single), rel=15 * u)
    assert relative_update_error(run, single) < 30 * u
    content = newest_checkpoint(run)
    assert content["scaler"]["scale"] == FIRST_SCALE
    assert content["scaler"]["_growth_tracker"] == NUM_STEPS

    # float16 cannot hold this scale: every step is skipped and halves it, and masters and copies do not change.
    content["scaler"]["scale"] = 2.0**60
    overflow = CheckpointFolder(tmp_path / "overflow").write(content)
    longer = ("--max-steps", str(NUM_STEPS + 3), "--start-from", str(overflow))
    skipped, _ = train_changed(use_float16, tmp_path, "skipped", 1, *words, *longer)
    assert newest_checkpoint(skipped)["scaler"]["scale"] == 2.0**57
    assert largest_difference(weights(skipped), weights(run)) == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("change", "first_scale"), [(use_stand_in, 2.0**16), (use_float16, FIRST_SCALE)])
def test_a_collapsed_loss_scale_ends_the_run(tmp_path, change, first_scale, level):
    """Every step is skipped and halves the scale, until the run ends with an error."""
    words = ("--opt-level", level, "--max-steps", "30", "--on-nonfinite", "skip")
    fault = Interrupt(signal.SIGCONT, 0, where="gradient")
    train_changed(change, tmp_path, "run", 1, *words, status=1, interrupt=fault)
    steps = int(math.log2(first_scale)) + 1
    [line] = [line for line in (tmp_path / "rank0.txt").read_text().splitlines() if line.startswith("error: ")]
    assert f" step {steps} is not finite; the loss scale has collapsed to 0.5, so steps change nothing" in line


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_apex_without_a_loss_scale_skips_what_is_not_finite(tmp_path, level):
    """At these levels no scaler checks the gradients, so --on-nonfinite has to."""
    words = ("--opt-level", level, "--max-steps", "5", "--on-nonfinite", "skip")
    fault = Interrupt(signal.SIGCONT, 3, where="gradient")
    run, _ = train_changed(use_stand_in, tmp_path, "run", 1, *words, interrupt=fault)
    assert "warning: skipped step 3" in (tmp_path / "rank0.txt").read_text()
    lines = [line for line in support.metrics(run) if "loss" in line]
    assert [line.get("skipped_steps", 0) for line in lines] == [0, 0, 1, 1, 1]
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


@pytest.mark.parametrize("change", [use_stand_in, use_plain_torch])
def test_what_is_clipped_are_the_masters(tmp_path, change):
    """One step without momentum moves the masters by the learning rate times the clipped norm."""
    words = ("--opt-level", "O2", "--max-steps", "1", "--seed", "1", "--warmup-steps", "0", "--momentum", "0")
    clip = ("--weight-decay", "0", "--lr", "10", "--clip-grad-norm", "0.1")
    run, _ = train_changed(change, tmp_path, "run", 1, *words, *clip)
    begun = first_weights()
    if change is use_stand_in:
        begun = {name: tensor.bfloat16().float() for name, tensor in begun.items()}
    squares = sum(float((tensor - begun[name]).double().square().sum()) for name, tensor in weights(run).items())
    assert math.sqrt(squares) == pytest.approx(10 * 0.1, rel=1e-3)


def count_passes():
    """Give the model a buffer to which each training pass adds one, a constant, and a cache that passes make."""
    original = recipe.load_data_and_model

    def count(module, inputs):
        module.passes += module.training
        module.cache = torch.ones(len(inputs[0]))

    def changed(*args):
        data, model = original(*args)
        model.register_buffer("passes", torch.zeros(3))
        model.register_buffer("constant", torch.tensor(0.1))
        model.register_buffer("cache", None, persistent=False)
        model.register_forward_pre_hook(count)
        return data, model

    recipe.load_data_and_model = changed


@pytest.mark.parametrize("world_size", [1, 2])
def test_o2_keeps_what_passes_write_to_buffers(tmp_path, world_size):
    words = ("--opt-level", "O2", *STEPS)
    run, _ = train_changed(count_passes, tmp_path, "whole", world_size, *words)
    middle = run / "checkpoints" / "step-000000010.pt"
    assert torch.load(middle, weights_only=True)["model"]["passes"].tolist() == [10.0] * 3
    resumed, _ = train_changed(count_passes, tmp_path, "resumed", world_size, *words, "--start-from", str(middle))
    content = newest_checkpoint(resumed)["model"]
    assert content["passes"].tolist() == [float(NUM_STEPS)] * 3
    assert content["constant"] == torch.tensor(0.1), "all of its fp32 digits"
    assert "cache" not in content


def test_o2_keeps_batch_norm_in_fp32():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    working = recipe.half_copy(model, torch.bfloat16)
    assert working[1] is model[1]
    assert working[0].weight.dtype == torch.bfloat16
    assert model[0].weight.dtype == model[1].weight.dtype == torch.float32
    working(torch.ones(2, 1, 8, 8, dtype=torch.bfloat16)).float().sum().backward()
    assert model[1].num_batches_tracked == 1
    assert model[1].bias.grad is not None
    assert model[0].weight.grad is None


def test_o3_saves_what_a_layer_keeps_beside_tensors():
    state = {"weight": torch.ones(2, dtype=torch.bfloat16), "_extra_state": {"calls": 3}}
    recipe.upcast(torch.nn.Identity(), state, "", {})
    assert state["weight"].dtype == torch.float32
    assert state["_extra_state"] == {"calls": 3}
