"""Buffers that the forward passes of a user's model change, each rank's by its own samples."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from recipes.common.data.splits import digest
from recipes.common.world.peers import Peers


def warning(model: nn.Module, peers: Peers) -> str:
    """Return a warning if a buffer differs between ranks, such as a running mean, else ""; call it on all ranks.

    Batch norm has a warning of its own.
    """
    owners = {name: module for name, module in model.named_modules() if not isinstance(module, _BatchNorm)}
    own = {
        f"{path}.{name}".lstrip("."): f"{tuple(buffer.shape)} {digest(buffer)}"
        for path, module in owners.items()
        for name, buffer in module.named_buffers(recurse=False)
    }
    # Buffers: each rank sends a digest of each of its buffers, once.
    with peers.watch("agreement"):
        gathered = peers.gather_objects(own)
    different = {name for facts in gathered for name, _ in facts.items() ^ gathered[0].items()}
    if not different:
        return ""
    what = f"each rank changes your model's buffer {min(different)} by its own samples"
    return f"warning: {what}, so losses depend on the number of processes"
