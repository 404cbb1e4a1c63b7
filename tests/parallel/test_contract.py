"""What every recipe keeps: the losses, evaluation and checkpoints of single at any world size, and what it sends.

RECIPES has an entry for each recipe. Nothing divides evenly: neither the batch by the ranks, nor the training set
by the batch, nor the test set by the ranks. The tolerance is 1e-5 relative: ranks sum the same numbers in another
order, which costs a few units of 2^-24 = 6e-8 a step, and 30 steps amplify that by less than a hundred.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import signal
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from recipes.common.data import load_data
from recipes.common.models.models import build_model
from recipes.common.seeding import hash_seed
from recipes.single.train import options
from tests import observe
from tests.conftest import slow
from tests.observe import observations, sent_per_step
from tests.support import (
    Interrupt,
    largest_difference,
    last_step,
    losses,
    metrics,
    newest_checkpoint,
    start_run,
    weights,
)

FP16, BF16 = 2.0**-11, 2.0**-8
"""Largest relative error of rounding to the format."""

ALONE, GROUPS = (1,), (2, 3, 7)
"""World sizes of one-process recipes, and of the others."""


@dataclass(frozen=True)
class Half:
    """Options that halve the bytes of gradients on the wire, and the tolerances of the losses with them."""

    options: tuple[str, ...]
    rounding: float
    """The largest relative error of rounding a gradient once. In a step, N ranks round it N + 1 times."""
    forward: float = 1e-6
    """The largest relative error of the loss of the first step."""


@dataclass(frozen=True)
class Recipe:
    """What a recipe supports."""

    name: str
    world_sizes: tuple[int, ...] = GROUPS
    options: tuple[str, ...] = ()
    """Options for full precision, if it is not the default."""
    layouts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Additional options, by world size."""
    batch_sizes: dict[int, int] = field(default_factory=lambda: {7: 10})
    """Global batch sizes by world size; 65 by default."""
    replicas: dict[int, int] = field(default_factory=dict)
    """Copies of the model by world size; by default one per rank."""
    draw_alike: dict[int, int] = field(default_factory=dict)
    """Neighbours that draw the same random numbers by world size; by default one."""
    passes: int = 1
    """Number of equal parts of a rank's batch that batch norm sees one by one."""
    half: dict[str, Half] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    """Options for a model that the recipe cannot split."""
    for_text: tuple[str, ...] = ()
    """Additional options for text, which the recipe can split."""
    gathers: int = 0
    """All-gathers of the weights per pass."""
    overhead: float = 0.02
    """Bound of the bytes that a rank sends per step besides the gradients, as a share of the fp32 gradients."""

    def batch_size(self, world_size: int) -> int:
        return self.batch_sizes.get(world_size, 65)

    def argv(self, world_size: int) -> tuple[str, ...]:
        """Return the options of a run in full precision."""
        size = str(self.batch_size(world_size))
        return ("--global-batch-size", size, *self.options, *self.layouts.get(world_size, ()))


DDP_HALF = {"fp16": Half(("--grad-compression", "fp16"), FP16), "bf16": Half(("--grad-compression", "bf16"), BF16)}
RECIPES = [
    Recipe("single", ALONE),
    Recipe("dataparallel", ALONE),
    Recipe("ddp", half=DDP_HALF),
    Recipe("spawn", half=DDP_HALF),
    # bfloat16 rounds 15 times between an image and LeNet's logits: test_apex.py has the arithmetic.
    Recipe("apex", options=("--opt-level", "O0"), half={"O2": Half(("--opt-level", "O2"), BF16, 15 * BF16)}),
    # Rows do not divide either: of 16 rows, each of 3 ranks sends 6. Gloo's reduce-scatter sends as many bytes as
    # its ring all-reduce.
    Recipe("fsdp", gathers=2, overhead=0.1),
    # At 3 ranks its bytes are those of data parallelism; test_tensor.py counts what the ranks of a replica send.
    Recipe("tensor", layouts={n: ("--tensor-parallel", str(p)) for n, p in ((2, 2), (3, 1), (7, 1))},
        whole=("--tensor-parallel", "1"), draw_alike={2: 2}),
    # LeNet has no sequence: its rows are those of data parallelism; test_context.py counts what a replica sends.
    Recipe("context", options=("--context-parallel", "1"), for_text=("--context-parallel", "2")),
    # Microbatches must be equal, so the replicas divide the batches here. LeNet has layers for at most 5 stages.
    Recipe("pipeline",
        layouts={n: ("--stages", str(p), "--num-microbatches", "2") for n, p in ((2, 2), (3, 1), (7, 1))},
        batch_sizes={2: 84, 3: 84, 7: 14}, replicas={2: 1}, passes=2),
    Recipe("scratch"),
    # Horovod's ranks keep exchanging which gradients are ready, even while they wait.
    Recipe("horovod", options=("--compression", "none"), half={"fp16": Half(("--compression", "fp16"), FP16)},
        overhead=0.25),
]  # fmt: skip
LAYOUTS = ("ddp", "fsdp", "tensor", "context", "pipeline")
"""The recipes that lay out the model or the batch in a way of their own; the others do as ddp or single."""
BY_NAME = {recipe.name: recipe for recipe in RECIPES}


def each_recipe(is_slow=lambda recipe: False):
    """Run a test with each recipe."""
    cases = [pytest.param(r, id=r.name, marks=[pytest.mark.slow] * is_slow(r)) for r in RECIPES]
    return pytest.mark.parametrize("recipe", cases, scope="module")


def each_size_of_each_recipe(is_slow):
    """Run a test with each recipe at each world size."""
    cases = [
        pytest.param(recipe, n, id=f"{recipe.name}-{n}", marks=[pytest.mark.slow] * is_slow(recipe, n))
        for recipe in RECIPES
        for n in recipe.world_sizes
    ]
    # Tests of the same runs follow each other, and so share one of pytest's workers.
    return pytest.mark.parametrize(("recipe", "world_size"), cases, scope="module")


each, each_layout = each_recipe(), each_recipe(lambda recipe: recipe.name not in LAYOUTS)
each_size = each_size_of_each_recipe(lambda recipe, n: n == 7)
each_size_of_a_layout = each_size_of_each_recipe(lambda recipe, n: recipe.name not in LAYOUTS or n > 2)

SEED = 1
DIGITS = ("--num-samples", "809")
"""An epoch has 12 batches of 65, 9 of 84 or 80 of 10; the test set has 101 samples."""


def is_available(name):
    return name != "horovod" or importlib.util.find_spec("horovod") is not None


def launch(name, world_size, folder, *argv, interrupt=None):
    """Run a recipe with observe_steps() until it ends; return the run's folder and the ranks' Outcome."""
    setup = functools.partial(observe.observe_steps, folder)
    # Time in ms between two rounds of Horovod's coordination; the default is 1, and a step would have many rounds.
    how = {"interrupt": interrupt, "setup": setup, "HOROVOD_CYCLE_TIME": "10"}
    job = start_run(name, folder, world_size, "--seed", str(SEED), "--device", "cpu", *argv, **how)
    return folder / "run", job.wait(check=True)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that returns the folder of a recipe's run with some options; each is trained once."""
    return functools.cache(
        lambda name, world_size, *argv: launch(name, world_size, tmp_path_factory.mktemp(name), *argv)[0]
    )


def steps(world_size):
    """Return the options for the data and the number of steps; 7 ranks share two cores, so they do fewer."""
    return (*DIGITS, "--max-steps", "13" if world_size == 7 else "30")


@pytest.fixture(scope="module")
def run(train):
    """Return a function that returns a recipe's run at a world size, with additional options."""
    return lambda recipe, world_size, *argv: train(
        recipe.name, world_size, *recipe.argv(world_size), *steps(world_size), *argv
    )


@pytest.fixture(scope="module")
def single(train):
    """Return a function that returns single's run with the batch size of a recipe at a world size."""
    return lambda recipe, world_size: train(
        "single", 1, "--global-batch-size", str(recipe.batch_size(world_size)), *steps(world_size)
    )


@pytest.fixture
def observed_data(monkeypatch):
    """Make this process load the same data and build the same models as the ranks."""
    for owner, name, value in observe.CHANGES:
        monkeypatch.setattr(owner, name, value)


def evaluations(path):
    return [line for line in metrics(path) if "test_loss" in line]


def momenta(content):
    return {str(key): values["momentum_buffer"] for key, values in content["optimizer"]["state"].items()}


def assert_same_position(ours, theirs):
    assert (ours["step"], ours["epoch"]) == (theirs["step"], theirs["epoch"])
    assert ours["averages"].get("test_accuracy") == theirs["averages"].get("test_accuracy")
    assert ours["averages"] == pytest.approx(theirs["averages"], rel=1e-5)
    assert ours["best_score"] == pytest.approx(theirs["best_score"], rel=1e-5)


def assert_same_checkpoint(path, expected):
    ours, theirs = newest_checkpoint(path), newest_checkpoint(expected)
    assert_same_position(ours["position"], theirs["position"])
    assert ours["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
    assert list(ours["model"]) == list(theirs["model"])
    assert largest_difference(ours["model"], theirs["model"]) < 1e-5
    assert largest_difference(momenta(ours), momenta(theirs)) < 1e-5


def assert_same_run(path, expected):
    assert losses(path) == pytest.approx(losses(expected), rel=1e-5)
    for ours, theirs in zip(evaluations(path), evaluations(expected), strict=True):
        assert (ours["epoch"], ours["step"]) == (theirs["epoch"], theirs["step"])
        assert ours.get("test_accuracy") == theirs.get("test_accuracy")
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-5)
    assert_same_checkpoint(path, expected)


def assert_every_sample_counts_once(path, num_samples, *argv):
    """Compare the last evaluation with one without batches or ranks."""
    args = options([*argv])
    data = load_data(args, torch.device("cpu"), print)
    model = build_model(args, data)
    model.load_state_dict(weights(path))
    model.eval()
    ((images, labels),) = data.test.batches([torch.arange(num_samples)], 0)
    with torch.no_grad():
        logits = model(images)
    assert len(data.test) == num_samples
    last = evaluations(path)[-1]
    assert last["test_accuracy"] == int((logits.argmax(1) == labels).sum()) / num_samples
    assert last["test_loss"] == pytest.approx(float(cross_entropy(logits.double(), labels)), rel=1e-6)


def test_nothing_divides(observed_data):
    data = load_data(options([*DIGITS]), torch.device("cpu"), print)
    assert (len(data.train), len(data.test)) == (809, 101)
    assert all(size % world_size for world_size in GROUPS for size in (809, 101, 65))
    assert all(809 % size for size in (10, 14, 65, 84))
    assert 10 % 7


# ---- the same trajectory


def test_single_equals_a_plain_loop(train, observed_data):
    """The reference for all others: whole batches, a new order in each epoch, a linear warm-up."""
    args = options([*DIGITS, "--seed", str(SEED)])
    data = load_data(args, torch.device("cpu"), print)
    model = build_model(args, data)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=0.01)
    expected, rates = [], [0.02 * (step + 1) / 100 for step in range(30)]
    for step, rate in enumerate(rates):
        epoch, place = divmod(step, 809 // 65)
        order = torch.randperm(809, generator=torch.Generator().manual_seed(hash_seed(SEED, epoch)))
        ((images, labels),) = data.train.batches([order[65 * place : 65 * (place + 1)]], epoch)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    path = train("single", 1, "--global-batch-size", "65", *steps(1))
    assert losses(path) == pytest.approx(expected, rel=1e-5)
    assert [line["lr"] for line in metrics(path) if "lr" in line] == pytest.approx(rates)
    assert largest_difference(weights(path), model.state_dict()) < 1e-5


@each_size
def test_every_step_and_evaluation_equal_single(run, single, recipe, world_size):
    assert_same_run(run(recipe, world_size), single(recipe, world_size))
    assert len(losses(run(recipe, world_size))) == (13 if world_size == 7 else 30)


@each_size
def test_every_sample_counts_once(run, observed_data, recipe, world_size):
    assert_every_sample_counts_once(run(recipe, world_size), 101, *DIGITS)


@each_size
def test_each_rank_draws_its_own_random_numbers(run, recipe, world_size):
    """Except that those of a replica of tensor compute some layers alike, and so draw alike."""
    for rank, lines in enumerate(observations(run(recipe, world_size).parent, world_size)):
        place = rank // recipe.draw_alike.get(world_size, 1)
        assert [line["seed"] for line in lines] == [hash_seed(SEED, step, place) for step in range(len(lines))]


NO_DECAY = ("--no-decay-norm-bias", "--weight-decay", "0.5")
"""These make two parameter groups; the default is one."""

TEXT = ("--data", "text", "--seq-len", "8", "--optimizer", "sgd", "--max-steps", "6", "--checkpoint-every", "3")
TEXT += (*NO_DECAY, "--warmup-steps", "3")


@each_layout
def test_text_has_the_same_curve_and_bits(train, text, recipe):
    """In a pipeline, the first and the last stage share a matrix."""
    world_size = recipe.world_sizes[0]
    own = (*recipe.argv(world_size), *recipe.for_text)
    path = train(recipe.name, world_size, *own, *TEXT, *text, "--clip-grad-norm", "1")
    size = str(recipe.batch_size(world_size))
    single = train("single", 1, "--global-batch-size", size, *TEXT, *text, "--clip-grad-norm", "1")
    assert_same_run(path, single)
    (ours,), (theirs,) = evaluations(path), evaluations(single)
    assert ours["test_bits_per_byte"] == pytest.approx(theirs["test_bits_per_byte"], rel=1e-5)
    norms, expected = ([line["grad_norm"] for line in metrics(run) if "loss" in line] for run in (path, single))
    assert norms == pytest.approx(expected, rel=1e-4)
    assert min(expected) > 0


@pytest.mark.parametrize(
    "name", ["ddp", "context", "pipeline", *slow("horovod", "apex", "scratch", "tensor", "fsdp", "dataparallel")]
)
def test_blocks_that_run_again_change_nothing(train, text, name):
    recipe = BY_NAME[name]
    world_size = recipe.world_sizes[0]
    own = (*recipe.argv(world_size), *recipe.for_text, *TEXT, *text)
    path = train(name, world_size, *own, "--activation-checkpointing")
    assert all(lines[-1]["again"] for lines in observe.observations(path.parent, world_size))
    assert_same_run(
        path, train("single", 1, "--global-batch-size", str(recipe.batch_size(world_size)), *TEXT, *text)
    )


def test_text_resumes_in_a_pipeline_at_the_exact_sample(train, text):
    argv = (*BY_NAME["pipeline"].argv(2), *TEXT, *text, "--clip-grad-norm", "1")
    whole = train("single", 1, "--global-batch-size", "84", *TEXT, *text, "--clip-grad-norm", "1")
    checkpoint = whole / "checkpoints" / "step-000000003.pt"
    path = train("pipeline", 2, *argv, "--start-from", str(checkpoint))
    assert losses(path, after=3) == pytest.approx(losses(whole)[3:], rel=1e-5)
    assert_same_checkpoint(path, whole)


# ---- given weights


@each_layout
def test_given_weights_train_as_in_single(train, single, recipe):
    """Only the weights are taken: the run has step 1 again, another batch, and momentum from zero."""
    world_size = recipe.world_sizes[0]
    size, given = str(recipe.batch_size(world_size)), ("--weights", str(single(BY_NAME["single"], 1)))
    argv = (*DIGITS, *given, "--max-steps", "6")
    path = train(recipe.name, world_size, *recipe.argv(world_size), *argv)
    assert_same_run(path, train("single", 1, "--global-batch-size", size, *argv))
    assert losses(path)[0] < 0.8 * losses(single(recipe, world_size))[0]


@each_size_of_a_layout
def test_given_weights_are_evaluated_on_every_sample(train, recipe, world_size):
    model = ("--model", "norm", *DIGITS)
    given = train("single", 1, *model, "--max-steps", "6")
    argv = (*recipe.argv(world_size), *recipe.whole, *model, "--weights", str(given), "--evaluate")
    path = train(recipe.name, world_size, *argv)
    (ours,), (theirs,) = evaluations(path), evaluations(given)
    assert (ours["epoch"], ours["step"], ours["test_accuracy"]) == (0, 0, theirs["test_accuracy"])
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-6)
    assert len(metrics(path)) == 1
    assert "warning" not in (path.parent / f"output-{path.name}" / "rank0.txt").read_text()
    assert not (path / "checkpoints").exists()
    result = json.loads((path / "result.json").read_text())
    assert (result["world_size"], result["test_accuracy"]) == (world_size, theirs["test_accuracy"])


@each_layout
def test_given_weights_of_a_gpt(train, text, recipe):
    """They have a tied matrix and, for tensor, packed ones."""
    world_size, size = recipe.world_sizes[0], str(recipe.batch_size(recipe.world_sizes[0]))
    given = train("single", 1, "--global-batch-size", size, *TEXT, *text, "--clip-grad-norm", "1")
    argv = (*TEXT, *text, "--weights", str(given))
    path = train(recipe.name, world_size, *recipe.argv(world_size), *recipe.for_text, *argv)
    assert_same_run(path, train("single", 1, "--global-batch-size", size, *argv))


@each
def test_accumulation_changes_nothing(run, single, recipe):
    world_size = 3 if 3 in recipe.world_sizes else 1
    assert_same_run(run(recipe, world_size, "--accumulate-steps", "2"), single(recipe, world_size))


# ---- batch norm, whose statistics are each rank's own until the evaluation


@each_size_of_a_layout
def test_all_ranks_evaluate_with_rank_0s_batch_norm(train, observed_data, recipe, world_size):
    """At 7 ranks, only one has a sample to evaluate."""
    num_test, digits = (1, ("--num-samples", "15")) if world_size == 7 else (101, DIGITS)
    argv = (*digits, "--model", "norm", "--max-steps", "6")
    path = train(recipe.name, world_size, *recipe.argv(world_size), *recipe.whole, *argv)
    assert_every_sample_counts_once(path, num_test, *argv)
    # In every recipe, a rank's statistics are those of its share of the batch: compare with ddp's.
    replicas, size = recipe.replicas.get(world_size, world_size), str(recipe.batch_size(world_size))
    same = ("--global-batch-size", size, "--accumulate-steps", str(recipe.passes))
    assert losses(path) == pytest.approx(losses(train("ddp", replicas, *same, *argv)), rel=1e-5)
    assert largest_difference(weights(path), weights(train("ddp", replicas, *same, *argv))) < 1e-5


# ---- batch norm over groups of the global batch, which no number of ranks changes


NORM = ("--model", "norm", *DIGITS)
NORM += ("--global-batch-size", "126", "--batchnorm-group", "3", "--checkpoint-every", "4")
GROUPED = (*NORM, "--max-steps", "15", "--keep-checkpoints", "9")
"""42 groups per step and 6 steps per epoch, so that some checkpoints are within epochs."""


def assert_same_statistics(path, expected, step):
    """Compare the weights and batch-norm statistics of a checkpoint with another run's."""
    name = f"checkpoints/step-{step:09d}.pt"
    ours, theirs = (torch.load(run / name, weights_only=True)["model"] for run in (path, expected))
    assert largest_difference(ours, theirs) < 1e-5
    assert ours["1.num_batches_tracked"] == step


@each_layout
def test_groups_of_batch_norm_are_the_same_in_every_recipe(train, recipe):
    world_size = 3 if 3 in recipe.world_sizes else 1
    layout = (*recipe.options, *recipe.layouts.get(world_size, ()))
    path, single = train(recipe.name, world_size, *layout, *GROUPED), train("single", 1, *GROUPED)
    assert_same_run(path, single)
    for step in (4, 6):  # within an epoch, and after its evaluation
        assert_same_statistics(path, single, step)


def test_groups_of_batch_norm_need_no_even_shares(train, observed_data):
    """Of 42 groups, each of 4 ranks has 10 or 11, and each of their 3 passes has 3 or 4."""
    path = train("ddp", 4, *GROUPED, "--accumulate-steps", "3")
    assert_same_run(path, train("single", 1, *GROUPED))
    assert_every_sample_counts_once(path, 101, *GROUPED)


def test_groups_of_batch_norm_resume_at_another_world_size(train):
    whole = train("single", 1, *GROUPED)
    path = train(
        "ddp", 2, *GROUPED, "--start-from", str(train("ddp", 4, *GROUPED) / "checkpoints/step-000000008.pt")
    )
    assert losses(path, after=8) == pytest.approx(losses(whole)[8:], rel=1e-5)
    assert_same_checkpoint(path, whole)


@pytest.mark.slow
def test_resnet18_has_one_curve_at_every_number_of_ranks(tmp_path):
    """In float64, because in float32 two runs that only round differently differ by 1e-3 after 50 steps."""
    argv = ("--model", "resnet18", "--batchnorm-group", "8", "--lr", "0.2", "--max-steps", "3")
    runs = []
    for world_size in (1, 8):
        how = {"name": f"run{world_size}", "setup": observe.compute_in_double}
        start_run("ddp", tmp_path, world_size, "--device", "cpu", *argv, **how).wait(check=True)
        runs.append(tmp_path / how["name"])
    single, eight = runs
    assert losses(eight) == pytest.approx(losses(single), rel=1e-6)
    (ours,), (theirs,) = evaluations(eight), evaluations(single)
    assert ours["test_accuracy"] == theirs["test_accuracy"]
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-6)
    assert largest_difference(weights(eight), weights(single)) < 1e-9


@pytest.mark.slow
def test_a_smooth_resnet18_has_one_curve_in_float32(train):
    """At the default learning rate; with ReLU, resnet18's losses would differ by 1e-3 after these steps."""
    argv = ("--model", "tests.observe:smooth_resnet18", "--global-batch-size", "64", "--batchnorm-group", "8")
    argv += (*DIGITS, "--max-steps", "10")
    single, two = train("ddp", 1, *argv), train("ddp", 2, *argv)
    assert losses(two) == pytest.approx(losses(single), rel=1e-5)
    (ours,), (theirs,) = evaluations(two), evaluations(single)
    assert ours["test_accuracy"] == theirs["test_accuracy"]
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-5)


def test_only_plain_batch_norm_warns_that_losses_depend_on_the_ranks(tmp_path):
    argv = ("--model", "norm", *DIGITS, "--max-steps", "1", "--warmup-steps", "0")
    said = "warning: batch norm normalises each of 2 parts of the batch by itself, so losses depend on the number"
    _, plain = launch("ddp", 2, tmp_path / "plain", *argv)
    assert plain.text.count(said) == 1
    assert "with --batchnorm-group 32 they are the same" in plain.outputs[0]
    _, grouped = launch("ddp", 2, tmp_path / "grouped", *argv, "--batchnorm-group", "32")
    assert "warning" not in grouped.text


def dropping(data):
    """Return a model with dropout."""
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(data.image_size**2, data.num_classes))


@pytest.mark.parametrize("world_size", [1, 2])
def test_dropout_warns_that_losses_depend_on_the_ranks(tmp_path, world_size):
    argv = ("--model", "tests.parallel.test_contract:dropping", *DIGITS, "--max-steps", "1")
    _, outcome = launch("ddp", world_size, tmp_path, *argv, "--warmup-steps", "0")
    said = "warning: dropout draws other numbers on each rank, so losses depend on the number of processes"
    assert outcome.text.count(said) == outcome.text.count("warning") == world_size - 1


# ---- bytes on the wire


@functools.cache
def shapes():
    """Return the shapes of LeNet's parameters."""
    args = options([])
    return [
        parameter.shape
        for parameter in build_model(args, load_data(args, torch.device("cpu"), print)).parameters()
    ]


def full_bytes():
    return 4 * sum(shape.numel() for shape in shapes())


def assert_sent(medians, recipe, gradient_bytes, messages=1, passes=1):
    """Assert that each rank sends the gradients once a step, in a ring all-reduce, and little else."""
    ring = (2 + passes * recipe.gathers) * (len(medians) - 1) / len(medians)
    overhead = messages * recipe.overhead * full_bytes()
    for median in medians:
        assert ring * gradient_bytes <= median <= ring * (gradient_bytes + overhead)


@each
@pytest.mark.parametrize("passes", [2, *slow(1)])
def test_gradients_cross_the_wire_once_a_step(run, recipe, passes):
    world_size = 3 if 3 in recipe.world_sizes else 1
    argv = ("--accumulate-steps", "2") if passes == 2 else ()
    sent = sent_per_step(run(recipe, world_size, *argv).parent, world_size)
    assert_sent(sent, recipe, full_bytes(), passes=passes)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("recipe", "half"),
    [
        pytest.param(recipe, h, id=f"{recipe.name}-{kind}", marks=[pytest.mark.slow] * (recipe.name == "spawn"))
        for recipe in RECIPES
        for kind, h in recipe.half.items()
    ],
)
def test_half_precision_halves_the_bytes(run, single, recipe, half, world_size):
    """Each step rounds a gradient N + 1 times; at worst, all these errors have the same sign."""
    path = run(recipe, world_size, *half.options)
    assert_sent(sent_per_step(path.parent, world_size), recipe, full_bytes() / 2)
    exact = losses(single(recipe, world_size))
    assert losses(path) != pytest.approx(exact, rel=1e-6)
    for step, (ours, theirs) in enumerate(zip(losses(path), exact, strict=True)):
        assert ours == pytest.approx(theirs, rel=half.forward + step * (world_size + 1) * half.rounding), step


with_ddp_options = pytest.mark.parametrize("name", ["ddp", *slow("spawn")])  # whose ranks are ddp's
POWERSGD = ("--grad-compression", "powersgd", "--powersgd-rank", "4")


@with_ddp_options
def test_powersgd_sends_two_factors(run, single, name):
    """After 10 whole gradients, an n x m gradient travels as (n + m) x 4 numbers if those are less than half."""
    path = run(BY_NAME[name], 3, *POWERSGD)
    matrices = [(shape[0], shape[1:].numel()) for shape in shapes()]
    numbers = sum(4 * (n + m) if 2 * 4 * (n + m) < n * m else n * m for n, m in matrices)
    assert numbers < sum(n * m for n, m in matrices) / 4
    assert_sent(sent_per_step(path.parent, 3, last=10), BY_NAME[name], full_bytes())
    assert_sent(sent_per_step(path.parent, 3, first=12), BY_NAME[name], 4 * numbers, messages=3)
    assert losses(path)[:11] == pytest.approx(losses(single(BY_NAME[name], 3))[:11], rel=1e-5)
    assert losses(path)[11:] != pytest.approx(losses(single(BY_NAME[name], 3))[11:], rel=1e-4)


@with_ddp_options
def test_powersgd_sends_later_what_it_leaves_out(train, name):
    """The sum of 60 gradients arrives, except for what is not sent yet: about one gradient of each layer.

    At this learning rate the weights do not change, so each run has the same gradients, and momentum sums them. If
    50 remainders were dropped instead of sent later, the error would be larger than two gradients.
    """
    argv = ("--max-steps", "60", "--lr", "1e-12", "--lr-schedule", "constant", "--warmup-steps", "0")
    argv += ("--momentum", "0.999", "--weight-decay", "0")
    exact = momenta(newest_checkpoint(train("single", 1, *argv)))
    arrived = momenta(newest_checkpoint(train(name, 2, *argv, *POWERSGD)))
    shares = [float((arrived[key] - exact[key]).norm() / exact[key].norm()) for key in exact]
    assert max(shares) < 2 / 60
    assert max(shares) > 1e-3  # it was compressed


@with_ddp_options
def test_a_sharded_optimizer_changes_nothing_and_sends_what_it_updates(train, name):
    """Besides the gradients in the ring, each parameter goes from its owner to the two other ranks."""
    path = train(name, 3, *LONG, "--zero")
    assert_same_run(path, train("single", 1, *LONG))
    expected = (2 * (3 - 1) + 2) * full_bytes()
    assert expected <= sum(sent_per_step(path.parent, 3)) <= 1.05 * expected


# ---- checkpoints: a signal ends a run of one recipe, and another recipe goes on at another world size


LONG = (*DIGITS, "--global-batch-size", "84", "--max-steps", "20", "--keep-checkpoints", "9", *NO_DECAY)
LONG += ("--warmup-steps", "5", "--label-smoothing", "0.1")
"""Two epochs of 9 steps, and two steps; a pipeline's replicas can split a batch of 84."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return a function that returns a recipe's run whose last rank got USR1 in step 12, and its Outcome."""

    def stop(recipe):
        world_size = 3 if 3 in recipe.world_sizes else 1
        interrupt = Interrupt(signal.SIGUSR1, 12, ranks=[world_size - 1])
        argv = (*recipe.argv(world_size), *LONG)
        return launch(recipe.name, world_size, tmp_path_factory.mktemp(recipe.name), *argv, interrupt=interrupt)

    return functools.cache(lambda name: stop(BY_NAME[name]))


@each
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(stopped, train, recipe):
    path, outcome = stopped(recipe.name)
    assert newest_checkpoint(path)["position"]["step"] == last_step(path) == 13  # the running step was completed
    assert f"wrote {path}/checkpoints/step-000000013.pt\n" in outcome.outputs[0]
    assert not any(outcome.outputs[1:])
    assert losses(path) == pytest.approx(losses(train("single", 1, *LONG))[:13], rel=1e-5)


@each
def test_another_recipe_goes_on_at_the_exact_sample(stopped, train, tmp_path, recipe):
    """Each recipe resumes the run of the one above it in RECIPES, the first that of the last."""
    names = [other.name for other in RECIPES if is_available(other.name) or other is recipe]
    path, _ = stopped(names[names.index(recipe.name) - 1])
    shutil.copytree(path, tmp_path / "run")
    world_size = recipe.world_sizes[0]
    path, _ = launch(recipe.name, world_size, tmp_path, *recipe.argv(world_size), *LONG, "--resume", "auto")
    assert_same_run(path, train("single", 1, *LONG))
