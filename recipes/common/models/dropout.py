"""Dropout and the like: layers that draw random numbers in training, each rank its own."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from recipes.common.seeding import seed_step


def draws_random_numbers(module: nn.Module) -> bool:
    """Return whether a layer draws random numbers: dropout, stochastic depth, attention or an RNN with dropout."""
    if isinstance(module, _DropoutNd) or type(module).__name__ == "StochasticDepth":  # torchvision's
        return bool(module.p)
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and bool(module.dropout)


def warning(model: nn.Module) -> str:
    """Return a warning if dropout makes the losses of several ranks differ from those of one, else ""."""
    if not any(map(draws_random_numbers, model.modules())):
        return ""
    return "warning: dropout draws other numbers on each rank, so losses depend on the number of processes"


def has_drawn(seed: int, step: int, rank: int, devices: Iterable[torch.device]) -> bool:
    """Return whether the passes of a step have drawn random numbers, and seed the generators for the step again.

    It finds what warning() cannot see in the layers, such as functional.dropout() or noise in a user's forward().
    """
    devices = list(devices)

    def states() -> tuple[str, ...]:
        gpus = [device for device in devices if device.type == "cuda"]
        tensors = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]
        return (*(str(tensor.tolist()) for tensor in tensors), str(random.getstate()), str(np.random.get_state()))

    drawn = states()
    seed_step(seed, step, rank, devices)
    return drawn != states()
