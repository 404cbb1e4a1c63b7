"""Run a minimal.py as one rank, in a process that has torch and scikit-learn imported."""

from __future__ import annotations

import functools
import os
import runpy
import sys
import traceback

import torch
import torch.multiprocessing as mp

from tests.support import ROOT


def run_page(recipe: str, argv: list[str]) -> None:
    """Do what `python recipes/RECIPE/minimal.py ARGV` does."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert not gpus or torch.cuda.device_count() == len(gpus.split(",")), "GPUs are missing: a page would use CPUs"
    path = ROOT / "recipes" / recipe / "minimal.py"
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(ROOT / "tests" / "stand_in"))  # apex.amp itself needs a GPU
    # Fork: a new interpreter would import torch, 10 s of a core. test_your_own.py starts the page as a user does.
    # Not where there may be GPUs: without NVML, torch cannot count them in a process that forks others.
    if gpus == "" or "STAND_IN_GPUS" in os.environ:
        mp.spawn = functools.partial(mp.start_processes, start_method="fork")
    status = 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.exit(status)


def shuffle_as_the_pages() -> None:
    """Make a recipe's train.py take the samples in the pages' order, a DistributedSampler's."""
    from recipes.common import job  # here: a rank that runs a page does not need it

    def order(size: int, seed: int, epoch: int, block: int) -> torch.Tensor:
        return torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch))

    job.permutation = order
