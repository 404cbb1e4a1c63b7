"""--compile: every pass of training and of evaluation goes through what was compiled."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.runtime.runtime_utils import default_cache_dir

from recipes.common.errors import UserError
from recipes.ddp.train import options
from tests.support import start_run

STEPS = 3


def sequence(data):
    """Return a model whose forward() is torch's own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, data.num_classes))


def count_graphs(folder):
    """Make torch.compile() only trace: each call of a graph that it has traced adds a byte to a file."""

    def count(graph, inputs):
        def call(*args):
            with open(folder / ("train" if torch.is_grad_enabled() else "eval"), "a") as file:
                file.write("x")
            return graph.forward(*args)

        return call

    compile_with = torch.compile
    torch.compile = lambda function, mode: compile_with(function, backend=count)


RECIPES = (
    *("single", "dataparallel", "ddp", "spawn", "apex", "scratch"),
    *("fsdp", "tensor", "context", "pipeline", "horovod"),
)
BLOCKS = {"lenet": 5, "tests.parallel.test_compile:sequence": 2}
"""Models with their layers that have weights: fsdp compiles each of these."""

ONE_PASS = {
    "tensor": ("--tensor-parallel", "1"),
    "context": ("--context-parallel", "1"),
    "pipeline": ("--stages", "1", "--num-microbatches", "1"),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", BLOCKS, ids=["class", "sequence"])
def test_every_pass_goes_through_a_compiled_graph(tmp_path, recipe, model):
    """The 360 test images make six batches of 64, as in training."""
    argv = ("--compile", "--max-steps", str(STEPS), "--device", "cpu", "--model", model, *ONE_PASS.get(recipe, ()))
    start_run(recipe, tmp_path, 1, *argv, setup=functools.partial(count_graphs, tmp_path)).wait(check=True)
    graphs = BLOCKS[model] if recipe == "fsdp" else 1
    assert [(tmp_path / name).stat().st_size / graphs for name in ("train", "eval")] == [STEPS, 6]


def test_blocks_of_full_shards_are_compiled(tmp_path):
    """Both ranks of a replica compile each of LeNet's 5 layers with weights."""
    argv = ("--compile", "--fully-shard", "--max-steps", str(STEPS), "--device", "cpu")
    start_run("tensor", tmp_path, 2, *argv, setup=functools.partial(count_graphs, tmp_path)).wait(check=True)
    passes = [(tmp_path / name).stat().st_size / 5 / 2 for name in ("train", "eval")]
    assert passes == [STEPS, 6]


def test_buckets_at_which_torch_cannot_cut_are_refused():
    """Torch would end the first step with an AssertionError."""
    options(["--compile", "--bucket-cap-mb", "1"])
    with pytest.raises(UserError, match=r"^--bucket-cap-mb 0.9: .*; use 1 or more, or drop --compile$"):
        options(["--compile", "--bucket-cap-mb", "0.9"])


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_a_mode_that_tries_kernels_for_minutes_is_told(tmp_path, mode):
    argv = ("--compile", "--compile-mode", mode, "--max-steps", "1", "--device", "cpu")
    outcome = start_run("single", tmp_path, 1, *argv, setup=functools.partial(count_graphs, tmp_path))
    told = "warning: --compile-mode max-autotune tries many kernels before the first step"
    assert (told in outcome.wait(check=True).text) is (mode == "max-autotune")


def plant(folder):
    """Make the folder for compiled code one to which all users can write, as another user may have."""
    tempfile.tempdir = str(folder)
    planted = Path(default_cache_dir())
    planted.mkdir(exist_ok=True)
    planted.chmod(0o777)


@pytest.mark.parametrize("recipe", ["ddp", "pipeline"])
def test_code_that_another_user_may_have_planted_is_not_run(tmp_path, recipe):
    argv = ("--compile", "--max-steps", "1", "--device", "cpu")
    outcome = start_run(recipe, tmp_path, 2, *argv, setup=functools.partial(plant, tmp_path)).wait()
    assert outcome.refusal.startswith(f"error: --compile: {tmp_path}/torchinductor_")
