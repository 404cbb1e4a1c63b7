"""DDP against the one-process run: the same numbers at any world size and with every option.

With fp32 throughout, the tolerance is 1e-5 relative: ranks sum the same numbers in another order, which costs a
few units of 2^-24 = 6e-8 a step, and 60 steps amplify that by less than a hundred.
"""

import functools
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import cross_entropy

from recipes.common.data import load_data
from recipes.common.models.models import build_model
from recipes.common.parallel.buckets import wrap_in_ddp
from recipes.common.seeding import permutation
from recipes.ddp.train import options
from tests.conftest import slow
from tests.support import (
    ROOT,
    Ranks,
    accuracies,
    assert_same_run,
    local,
    losses,
    newest_checkpoint,
    run_command,
    train,
    weights,
    words_for,
)

STEPS = ("--max-steps", "60", "--seed", "1")


@pytest.fixture(scope="session")
def baseline(tmp_path_factory):
    """Return a function that returns the one-process run with some options; each is trained once."""
    return functools.cache(lambda *argv: train("single", tmp_path_factory.mktemp("single"), 1, *argv))


@pytest.mark.parametrize(("world_size", "nodes"), [(1, 1), (4, 2)])
def test_every_step_equals_single(baseline, tmp_path, world_size, nodes):
    run = train("ddp", tmp_path, world_size, *STEPS, nodes=nodes)
    assert len(losses(run)) == 60
    assert len(accuracies(run)) == 3  # two whole epochs of 1437 // 64 = 22 steps, and the last step's
    assert_same_run(run, baseline(*STEPS))


def test_gradients_are_the_buckets_and_no_second_copy_of_the_models_size():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = wrap_in_ddp(torch.nn.Linear(64, 64), options([]))
        ddp(torch.ones(1, 64)).sum().backward()
        weight, bias = (parameter.grad.untyped_storage().data_ptr() for parameter in ddp.parameters())
        assert weight == bias, "both lie in one bucket"
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_local_nodes_equal_single(baseline, tmp_path):
    """Run the whole path of `make run RECIPE=ddp NODES=2 NPROC_PER_NODE=2`."""
    argv = ("--max-steps", "25", "--seed", "1")
    result = local("ddp", 2, 2, *words_for(tmp_path, "real", *argv)).wait(check=True)
    assert result.stdout.splitlines()[-1].startswith("result recipe=ddp world_size=4 test_accuracy=0.")
    assert_same_run(tmp_path / "real", baseline(*argv))


@pytest.mark.slow
def test_plain_torchrun_equals_single(baseline, tmp_path):
    argv = ("--max-steps", "5", "--seed", "1")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    words = words_for(tmp_path, "torchrun", *argv)
    run_command(*torchrun, "-m", "recipes.ddp.train", *words, OMP_NUM_THREADS="1", check=True)
    assert_same_run(tmp_path / "torchrun", baseline(*argv))


@pytest.mark.parametrize(
    "argv",
    [
        ["--scale-lr", "--lr", "0.3", "--global-batch-size", "96"],
        ["--lr-schedule", "constant", "--warmup-steps", "0", "--momentum", "0"],
        ["--accumulate-steps", "2", "--clip-grad-norm", "0.3"],
        *slow(
            ["--no-channels-last"],
            ["--optimizer", "adamw", "--lr", "0.002"],
            ["--data", "synthetic", "--num-samples", "200", "--image-size", "16", "--global-batch-size", "50"],
        ),
    ],
    ids=lambda argv: argv[0][2:] if len(argv) < 4 else argv[0][2:] + argv[2],
)
def test_options_mean_the_same_as_in_single(baseline, tmp_path, argv):
    run = train("ddp", tmp_path, 3, *STEPS, *argv)
    assert_same_run(run, baseline(*STEPS, *argv))
    if argv != ["--no-channels-last"]:  # a memory layout changes no number; all other options must
        assert losses(run)[5:] != pytest.approx(losses(baseline(*STEPS))[5:], rel=1e-3)


def test_clipping_bounds_the_step(tmp_path):
    """One step of plain SGD with a tiny bound moves the weights by lr x bound, whatever the world size."""
    words = ("--optimizer", "sgd", "--momentum", "0", "--weight-decay", "0", "--lr", "0.5")
    words += ("--lr-schedule", "constant", "--warmup-steps", "0", "--max-steps", "1", "--clip-grad-norm", "0.01")
    args = options([*words])
    before = build_model(args, load_data(args, torch.device("cpu"), print)).state_dict()
    after = weights(train("ddp", tmp_path, 2, *words))
    moved = torch.cat([(after[name].double() - before[name].double()).flatten() for name in before]).norm()
    assert float(moved) == pytest.approx(0.5 * 0.01, rel=1e-4)  # clip_grad_norm_ adds 1e-6 to the norm of ~1


def test_a_sharded_adamw_equals_single(baseline, tmp_path):
    """test_contract.py has SGD."""
    argv = (*STEPS, "--optimizer", "adamw", "--lr", "0.002")
    run = train("ddp", tmp_path, 3, *argv, "--zero")
    assert_same_run(run, baseline(*argv))
    # The checkpoint holds the whole optimizer state, as if it had never been sharded.
    ours, theirs = newest_checkpoint(run)["optimizer"], newest_checkpoint(baseline(*argv))["optimizer"]
    assert ours["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(ours["state"][key][name], value, rtol=1e-4, atol=1e-5)


# ---- numbers that cross the wire, or are computed, with fewer bits

UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding to the format: half a unit in the last of its 11 or 8 significant bits."""

SMALLEST = {"fp16": 2.0**-25, "bf16": 2.0**-134}
"""Largest absolute error of rounding below the format's normal numbers: half the smallest subnormal number."""

ONE_PLAIN_STEP = ("--momentum", "0", "--weight-decay", "0", "--lr", "1", "--lr-schedule", "constant")
ONE_PLAIN_STEP += ("--warmup-steps", "0", "--max-steps", "1", "--seed", "1")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_compressed_gradient_is_within_its_rounding(baseline, tmp_path, kind, world_size):
    """With lr 1, a step subtracts the gradient itself, so its elements can be compared one by one.

    Each rank's gradient is rounded when it is cast and again when it is divided by the world size; summing N of
    them rounds N - 1 times. So each element's error is at most (N + 1) u times the mean of the ranks' absolute
    gradients, plus the absolute error of subnormal numbers for each rounding.
    """
    args = options([*ONE_PLAIN_STEP])
    data = load_data(args, torch.device("cpu"), print)
    model = build_model(args, data)
    batch = permutation(len(data.train), args.seed, 0)[:64]
    bound = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank in range(world_size):
        share = batch[64 * rank // world_size : 64 * (rank + 1) // world_size]
        for images, labels in data.train.batches([share], 0):
            model.zero_grad()
            (cross_entropy(model(images), labels, reduction="sum") / 64).backward()
            for total, parameter in zip(bound, model.parameters(), strict=True):
                total += parameter.grad.abs()
    exact = weights(baseline(*ONE_PLAIN_STEP))
    run = weights(train("ddp", tmp_path, world_size, *ONE_PLAIN_STEP, "--grad-compression", kind))
    errors = {name: (run[name] - exact[name]).abs() for name in exact}
    roundings = world_size + 1
    for (name, error), largest in zip(errors.items(), bound, strict=True):
        fp32 = 4 * 2.0**-24 * (exact[name].abs() + largest)
        assert (error <= roundings * (UNIT[kind] * largest + SMALLEST[kind]) + fp32).all(), name
    assert max(float(error.max()) for error in errors.values()) > 1e-6  # it was rounded


def test_powersgd_with_every_rank_is_exact(baseline, tmp_path):
    """If the factors would not be smaller than the gradient, the gradient travels whole."""
    run = train("ddp", tmp_path, 3, *STEPS, "--grad-compression", "powersgd", "--powersgd-rank", "200")
    assert_same_run(run, baseline(*STEPS))


def see_a_gpu():
    torch.cuda.is_available = lambda: True


def test_powersgd_on_cpus_is_refused_where_torch_sees_a_gpu(tmp_path):
    words = words_for(tmp_path, "run", *STEPS, "--device", "cpu", "--grad-compression", "powersgd")
    outcome = Ranks("ddp", words, 2, tmp_path / "out", setup=see_a_gpu).wait()
    assert "CUDA_VISIBLE_DEVICES= " in outcome.refusal


def say_buckets():
    exchange = powerSGD_hook.powerSGD_hook

    def saying(state, bucket):
        print("a bucket", flush=True)
        return exchange(state, bucket)

    powerSGD_hook.powerSGD_hook = saying


@pytest.mark.slow
def test_powersgd_exchanges_many_buckets_in_one_order(tmp_path):
    """Four buckets or more, of three messages each: two runs are equal to the last bit."""
    words = ("--max-steps", "40", "--seed", "1", "--grad-compression", "powersgd", "--bucket-cap-mb", "0.005")
    words += ("--deterministic",)
    first, second = (train("ddp", tmp_path / name, 3, *words, setup=say_buckets) for name in ("first", "second"))
    output = (tmp_path / "first" / "output-ddp-3" / "rank0.txt").read_text()
    assert output.count("a bucket\n") >= 4 * 40, "in each step"
    assert losses(first) == losses(second)
    assert losses(first)[-1] < losses(first)[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_mixed_precision_stays_close(baseline, tmp_path, kind):
    """Ranks round the gradients of their shares, but one process rounds the gradient of the whole batch.

    A pass through LeNet's five layers and back rounds about 10 times; K steps and N ranks do so independently.
    CPUs without fp16 instructions also accumulate in fp16, which rounds more often: there, over four seeds, losses
    differ by up to 1.2 times that bound, so fp16 gets a factor of 3.
    """
    most = {"fp16": 3 * UNIT["fp16"], "bf16": UNIT["bf16"]}[kind]
    argv = (*STEPS, "--amp", kind)
    run, single = train("ddp", tmp_path, 2, *argv), baseline(*argv)
    for step, (ours, theirs) in enumerate(zip(losses(run), losses(single), strict=True)):
        assert ours == pytest.approx(theirs, rel=(10 * (step + 1) * 2) ** 0.5 * most), step
    assert losses(run) != pytest.approx(losses(baseline(*STEPS)), rel=1e-6)  # it did compute with fewer bits
    if kind == "bf16":  # fp16 skips the first steps, until its scale is small enough, so its curve differs
        assert losses(run) == pytest.approx(losses(baseline(*STEPS)), rel=(10 * 60 * 2) ** 0.5 * most)


@pytest.mark.slow
def test_fp16_skips_the_same_steps_and_keeps_the_same_scale(baseline, tmp_path):
    argv = (*STEPS, "--amp", "fp16", "--clip-grad-norm", "0.5")
    run, single = train("ddp", tmp_path, 2, *argv), baseline(*argv)
    assert newest_checkpoint(run)["scaler"] == newest_checkpoint(single)["scaler"]
    assert newest_checkpoint(run)["scaler"]["scale"] > 1
    exact = losses(baseline(*STEPS, "--clip-grad-norm", "0.5"))
    assert losses(run) == pytest.approx(exact, rel=3 * (10 * 60 * 2) ** 0.5 * UNIT["fp16"])  # unscaled, clipped


@pytest.mark.slow
def test_the_example_of_the_docstring_reaches_its_accuracy(tmp_path):
    """Real data, default options: at least 97% of the test set."""
    run = train("ddp", tmp_path, 2)
    assert accuracies(run)[-1] >= 0.97
    assert len(losses(run)) == 40 * 22
    assert (ROOT / "recipes/ddp/train.py").read_text().count("test_accuracy=0.98") == 1
