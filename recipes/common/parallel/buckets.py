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
"""The keyword that lets DistributedDataParallel leave buffers alone; newer versions of torch have renamed it."""


def settle_buckets(ddp: nn.Module, data: Data, device: torch.device) -> None:
    """Let DDP put its buckets together as they will stay; call it on all ranks, before the model is compiled.

    The first backward shows the order in which gradients come, and the buckets are rebuilt by it. The
    place in a bucket decides how a sum over three or more ranks is rounded. So that the first step after a resume
    rounds like any other, a pass over a blank image (in eval(): it changes no statistics) comes before.
    """
    ddp.eval()
    ddp(data.input.zeros(1, device)).sum().backward()
    ddp.zero_grad()
