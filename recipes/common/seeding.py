"""Random numbers as a function of (seed, step, rank), so that nothing but the step has to be saved.

If the state of the generators carried over from step to step, it would have to be saved for every rank and
could not be restored at another world size. Seeding them again from the position makes a resumed run draw the
same numbers as an uninterrupted one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

import numpy as np
import torch

from recipes.common.options import Options


def hash_seed(*numbers: int) -> int:
    """Hash a few integers to 63 bits: close inputs give unrelated seeds (the mixer of splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def permutation(size: int, seed: int, epoch: int, block: int = 1) -> torch.Tensor:
    """Return the order of the samples in an epoch, the same on every rank: int64, shape (size,).

    Blocks of `block` samples stay together; the last block may be shorter.
    """
    generator = torch.Generator().manual_seed(hash_seed(seed, epoch))
    blocks = torch.randperm(-(-size // block), generator=generator)
    if block == 1:
        return blocks  # of 100 million samples, the lines below take twice the memory again, on each rank
    order = (blocks.unsqueeze(1) * block + torch.arange(block)).flatten()
    return order[order < size]


def seed_all(value: int) -> None:
    """Seed what draws on the CPU: torch, numpy and Python's random, which a user's model may use."""
    torch.default_generator.manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)


def seed_step(seed: int, step: int, rank: int, devices: Iterable[torch.device]) -> None:
    """Seed the generators that dropout and the like use: differently on each rank, alike if a step is repeated.

    `devices` are this rank's. The i-th of them draws what the only device of rank + i would.
    """
    for number, device in enumerate(devices):
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(hash_seed(seed, step, rank + number))
    seed_all(hash_seed(seed, step, rank))


def choose_kernels(args: Options) -> None:
    """Make torch use bit-for-bit repeatable kernels or cuDNN's fastest, and TF32 or full float32 (--tf32)."""
    if args.deterministic:
        # cuBLAS reads this when it creates its handle, before the first CUDA matrix product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not args.deterministic
    if args.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
