"""Random numbers as a function of (seed, step, rank), so that nothing but the step has to be saved.

A generator whose state runs on from step to step has to be stored for every rank, and cannot be
restored at another world size. Seeding afresh from the position instead makes a resumed run draw the
very numbers that the uninterrupted one would have drawn.
"""

from __future__ import annotations

import os

import torch

from recipes.common.options import Options


def mix(*numbers: int) -> int:
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

    Blocks of so many samples stay together; the last block may be shorter.
    """
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    blocks = torch.randperm(-(-size // block), generator=generator)
    order = (blocks.unsqueeze(1) * block + torch.arange(block)).flatten()
    return order[order < size]


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed what dropout and the like draw in this step; ranks differ, and a repeated step does not."""
    value = mix(seed, step, rank)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


def choose_kernels(args: Options) -> None:
    """Ask torch for bit-for-bit repeatable kernels or cuDNN's fastest, and for float32 in TF32 or in full."""
    if args.deterministic:
        # cuBLAS reads this when its handle is made: before the first CUDA matrix product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not args.deterministic
    if args.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
