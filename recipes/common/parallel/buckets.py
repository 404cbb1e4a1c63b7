"""DistributedDataParallel's buckets: the gradients that travel together."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recipes.common.data import Data

KEYWORDS = inspect.signature(DistributedDataParallel).parameters
NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in KEYWORDS else "broadcast_buffers": False
}
"""The argument that stops DistributedDataParallel from broadcasting buffers; newer torch has renamed it."""


def settle_buckets(ddp: nn.Module, data: Data, device: torch.device) -> None:
    """Make DDP build its final buckets; call it on all ranks, before the model is compiled.

    DDP rebuilds its buckets in the order in which the first backward computes gradients. A gradient's place in a
    bucket decides how a sum over three or more ranks is rounded. A pass over a blank sample, before training,
    makes the first step after a resume round like any other. It runs in eval(), so that it changes no statistics.
    """
    ddp.eval()
    ddp(data.input.zeros(1, device)).sum().backward()
    ddp.zero_grad()
