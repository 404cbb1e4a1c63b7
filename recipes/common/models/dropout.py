"""Dropout and the like: layers that draw random numbers in training, each rank its own."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def draws(module: nn.Module) -> bool:
    """Return whether a layer draws random numbers: dropout, stochastic depth, attention or an RNN with dropout."""
    if isinstance(module, _DropoutNd) or type(module).__name__ == "StochasticDepth":  # torchvision's
        return bool(module.p)
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and bool(module.dropout)


def warning(model: nn.Module) -> str:
    """Return a warning if dropout makes the losses of several ranks differ from those of one, else ""."""
    if not any(map(draws, model.modules())):
        return ""
    return "warning: dropout draws other numbers on each rank, so losses depend on the number of processes"
