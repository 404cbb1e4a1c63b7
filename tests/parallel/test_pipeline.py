"""Pipeline against the one-process run: the same numbers for every grid, schedule and kind of split."""

import functools
import shlex

import pytest
import torch
from PIL import Image
from torch import nn

from recipes.pipeline.stages import SCHEDULES
from tests.conftest import slow
from tests.support import (
    assert_same_run,
    largest_difference,
    losses,
    metrics,
    newest_checkpoint,
    optimizer_tensors,
    start_run,
    train,
    weights,
)

STEPS = ("--max-steps", "30", "--seed", "1")
VIT = shlex.split("--model vit-tiny --optimizer adamw --lr 1e-3 --max-steps 6 --clip-grad-norm 0.5")


def assert_equal(run, expected):
    assert_same_run(run, expected)
    ours, theirs = map(optimizer_tensors, (run, expected))
    assert largest_difference(ours, theirs) < 1e-4  # momenta add up ten gradients


def say_schedules():
    """Print which schedule is made, and of a step in training how many outputs it has kept, if any."""
    for name, make in list(SCHEDULES.items()):
        SCHEDULES[name] = functools.partial(watched, name, make)


def watched(name, make, *args, **how):
    print(f"by {name}")
    schedule = make(*args, **how)
    step = schedule.step

    def stepping(*inputs, **given):
        result = step(*inputs, **given)
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        kept = sum(len(stage.output_chunks) for stage in stages)
        if "target" in given and (kept or result is not None):
            print(f"kept {kept} outputs")
        return result

    schedule.step = stepping
    return schedule


@pytest.mark.parametrize(
    ("world_size", "stages", "options"),
    [
        (2, 2, ("--schedule", "interleaved")),
        (4, 2, ("--schedule", "gpipe", "--accumulate-steps", "2")),
        (2, 3, ("--split", "in-process", "--accumulate-steps", "2")),
        *slow((4, 2, ("--schedule", "interleaved")), (4, 4, ("--schedule", "1f1b", "--num-microbatches", "8"))),
    ],
)
def test_every_step_equals_single(single, tmp_path, world_size, stages, options):
    argv = ("--stages", str(stages), *options, *STEPS)
    run = train("pipeline", tmp_path, world_size, *argv, setup=say_schedules)
    assert_equal(run, single)
    folder = tmp_path / f"output-pipeline-{world_size}"
    output, *others = ((folder / f"rank{rank}.txt").read_text() for rank in range(world_size))
    assert "kept" not in " ".join([output, *others])
    expected = ["by " + options[1]] * 2 if options[0] == "--schedule" else []  # for training and for evaluation
    assert [line for line in output.splitlines() if line.startswith("by ")] == expected


def test_a_transformer_equals_single_with_adamw_and_a_clipped_gradient(tmp_path):
    expected = train("single", tmp_path, 1, *VIT)
    run = train("pipeline", tmp_path, 4, *VIT, "--balance", "cost")
    assert_equal(run, expected)


class Residual(nn.Sequential):
    """A sequence whose forward() does more."""

    def forward(self, inputs):
        return inputs + super().forward(inputs)


def repeating(data):
    """Return a model that applies layers again, with and without parameters, in other stages too."""
    act, linear = nn.Tanh(), nn.Linear(32, 32)
    residual = Residual(nn.Linear(32, 32), act)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), act, linear, act, residual, linear, nn.Linear(32, 10))


def test_a_model_whose_layers_occur_again_equals_single(tmp_path):
    argv = ("--model", "tests.parallel.test_pipeline:repeating", "--max-steps", "6", "--lr", "0.5")
    expected = train("single", tmp_path, 1, *argv)
    run = train("pipeline", tmp_path, 4, *argv, "--clip-grad-norm", "100", "--balance", "parameters")
    assert_equal(run, expected)


class DropsGradient(nn.Module):
    """Multiplies by a matrix, which gets no gradient in some of each four steps."""

    def __init__(self, matrix, steps_without):
        super().__init__()
        self.matrix, self.steps_without, self.step = matrix, steps_without, 0

    def forward(self, inputs):
        has_none = self.training and self.step % 4 in self.steps_without
        self.step += self.training
        return inputs @ (self.matrix.detach() if has_none else self.matrix)


def tied(data):
    """Return a model whose first and last stage share a matrix: both train it, one of them, or none."""
    matrix = nn.Parameter(torch.eye(64))
    first, last = DropsGradient(matrix, {1, 2}), DropsGradient(matrix, {2, 3})
    return nn.Sequential(nn.Flatten(), first, nn.Linear(64, 64), nn.Tanh(), last, nn.Linear(64, 10))


def test_a_shared_matrix_is_trained_alike_where_not_all_stages_give_it_a_gradient(tmp_path):
    options = "--max-steps 9 --lr 0.1 --warmup-steps 0 --weight-decay 0.1 --clip-grad-norm 1"
    argv = ("--model", "tests.parallel.test_pipeline:tied", *options.split())
    expected = train("single", tmp_path, 1, *argv)
    assert_equal(train("pipeline", tmp_path, 2, *argv, "--schedule", "gpipe", "--num-microbatches", "1"), expected)


class Halved(nn.Linear):
    """A layer that changes its input in place."""

    def forward(self, inputs):
        inputs *= 0.5
        return super().forward(inputs)


def halving(data):
    """Return a model with such layers, one of which begins a stage."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), Halved(32, 32), Halved(32, 32), nn.Linear(32, 10))


@pytest.mark.parametrize("schedule", ["1f1b", *slow("interleaved")])
def test_a_stage_may_change_its_input_in_place(tmp_path, schedule):
    argv = ("--model", "tests.parallel.test_pipeline:halving", "--max-steps", "6", "--lr", "0.5")
    expected = train("single", tmp_path, 1, *argv)
    assert_equal(train("pipeline", tmp_path, 2, *argv, "--schedule", schedule), expected)


def test_groups_of_batch_norm_have_no_warning_that_losses_depend_on_the_processes(tmp_path):
    for argv, is_warned in (((), True), (("--batchnorm-group", "4"), False)):
        name = f"warned-{is_warned}"
        words = ("--model", "tests.parallel.test_fsdp:normed_model", "--max-steps", "1", *argv)
        words += ("--split", "in-process", "--stages", "2")
        outcome = start_run("pipeline", tmp_path, 1, *words, name=name).wait(check=True)
        assert ("losses depend on the number of processes" in outcome.outputs[0]) is is_warned


def test_bf16_follows_single(tmp_path):
    options = ("--amp", "bf16", "--max-steps", "4")
    expected = train("single", tmp_path, 1, *options)
    # Each stage rounds like the whole model; only the order of sums over microbatches differs.
    assert losses(train("pipeline", tmp_path, 2, *options)) == pytest.approx(losses(expected), rel=2**-8)


@pytest.mark.parametrize(
    ("world_size", "options", "words"),
    [
        (3, "", "--stages 2 does not divide 3 processes; start 2 or 4, or give --stages 3"),
        (2, "--global-batch-size 62", "does not divide into 1 replicas x 1 passes x 4 microbatches; use 60 or 64"),
        (2, "--model densenet121 --data synthetic --image-size 64 --num-samples 64", "DenseNet"),
        (1, "--split in-process --stages 6", "cannot be cut into 6 parts, each from a layer"),
    ],
)
def test_refuses_in_one_line(tmp_path, world_size, options, words):
    outcome = start_run("pipeline", tmp_path, world_size, *options.split()).wait()
    assert words in outcome.refusal
    assert outcome.outputs == [f"{outcome.refusal}\n", *[""] * (world_size - 1)]


def test_the_weights_are_the_same_bits_after_a_checkpoint_went_round(single, tmp_path):
    begun = newest_checkpoint(single)["model"]
    run = train("pipeline", tmp_path, 2, *STEPS, "--start-from", str(single), "--max-steps", "31", "--lr", "1e-30")
    assert all(torch.equal(value, begun[name]) for name, value in weights(run).items())


@pytest.fixture
def images_with_a_bad_one(tmp_path):
    for split, count in (("train", 16), ("val", 5)):
        for i in range(count):
            path = tmp_path / "images" / split / f"class{i % 2}" / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (10 * i, 100, 100)).save(path)
    path.write_bytes(b"no image")  # the last image of val
    return tmp_path / "images"


@pytest.mark.slow
def test_a_bad_image_ends_all_ranks_or_is_counted_once(images_with_a_bad_one, tmp_path):
    words = shlex.split("--data imagefolder --image-size 16 --workers 0 --global-batch-size 16 --max-steps 1")
    words += ["--data-dir", str(images_with_a_bad_one)]
    assert "04.png" in start_run("pipeline", tmp_path, 4, *words).wait().refusal
    run = train("pipeline", tmp_path, 4, *words, "--skip-bad-images")
    (epoch,) = [line for line in metrics(run) if "test_accuracy" in line]
    assert epoch["skipped_images"] == 1
    assert (4 * epoch["test_accuracy"]).is_integer()


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_all_ranks(tmp_path):
    job = start_run("pipeline", tmp_path, 2, "--epochs", "100000")
    job.wait_for_text("epoch 2 ")
    # Rank 0 cannot remove this "leftover" of an earlier write, as on a disk that has become read-only.
    (tmp_path / "run" / "checkpoints" / "blocked.tmp").mkdir()
    outcome = job.wait()
    assert "cannot write" in outcome.refusal
    assert not outcome.outputs[1]
