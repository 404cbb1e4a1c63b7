"""--compile: every pass of training and of evaluation goes through what was compiled."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.runtime_utils import default_cache_dir

from tests.support import start_run

STEPS = 3


def count_compiled_passes(folder):
    """Make compile() only count: each forward pass of a module it was called on adds a byte to a file."""

    def compile_nothing(module, mode):
        def call(*args, **kwargs):
            with open(folder / ("train" if torch.is_grad_enabled() else "eval"), "a") as file:
                file.write("x")
            return module._call_impl(*args, **kwargs)

        module._compiled_call_impl = call

    torch.nn.Module.compile = compile_nothing


RECIPES = (
    *("single", "dataparallel", "ddp", "spawn", "apex", "scratch"),
    *("fsdp", "tensor", "context", "pipeline", "horovod"),
)
BLOCKS = {"fsdp": 5}
"""Modules that are compiled one by one: fsdp compiles each of LeNet's layers with weights."""

ONE_PASS = {
    "tensor": ("--tensor-parallel", "1"),
    "context": ("--context-parallel", "1"),
    "pipeline": ("--stages", "1", "--num-microbatches", "1"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_goes_through_the_compiled_model(tmp_path, recipe):
    """The 360 test images make six batches of 64, as in training."""
    argv = ("--compile", "--max-steps", str(STEPS), "--device", "cpu", *ONE_PASS.get(recipe, ()))
    setup = functools.partial(count_compiled_passes, tmp_path)
    start_run(recipe, tmp_path, 1, *argv, setup=setup).wait(check=True)
    passes = [(tmp_path / name).stat().st_size / BLOCKS.get(recipe, 1) for name in ("train", "eval")]
    assert passes == [STEPS, 6]


def test_blocks_of_full_shards_are_compiled(tmp_path):
    """Both ranks of a replica compile each of LeNet's 5 layers with weights."""
    argv = ("--compile", "--fully-shard", "--max-steps", str(STEPS), "--device", "cpu")
    start_run("tensor", tmp_path, 2, *argv, setup=functools.partial(count_compiled_passes, tmp_path)).wait(
        check=True
    )
    passes = [(tmp_path / name).stat().st_size / 5 / 2 for name in ("train", "eval")]
    assert passes == [STEPS, 6]


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_a_mode_that_tries_kernels_for_minutes_is_told(tmp_path, mode):
    argv = ("--compile", "--compile-mode", mode, "--max-steps", "1", "--device", "cpu")
    outcome = start_run("single", tmp_path, 1, *argv, setup=functools.partial(count_compiled_passes, tmp_path))
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
