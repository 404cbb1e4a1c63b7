"""Send a checkpoint's content from rank 0 to all ranks, a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recipes.common.world.agreement import Slot, map_tree
from recipes.common.world.peers import Peers


def broadcast_tree(tree: Any, peers: Peers, own_part: Callable[[Any], Any] = lambda outline: outline) -> Any:
    """Return rank 0's tree of dicts, lists and tensors on the CPU; call it on all ranks.

    Tensors are sent one by one: besides the result, at most one tensor is in memory (on rank 0, the tree, too).
    `own_part` gets the tree with a Slot for each tensor, and may set which part of each this rank keeps.
    """
    sent: list[Tensor] = []

    def put_slot(tensor: Tensor) -> Slot:
        sent.append(tensor)
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        return Slot(tuple(tensor.shape), tensor.dtype, tuple(order))

    def fill_slot(slot: Slot) -> Tensor:
        shape = [slot.shape[i] for i in slot.order]
        if peers.rank == 0:
            buffer = next(tensors).permute(slot.order).contiguous()
        else:
            buffer = torch.empty(shape, dtype=slot.dtype)
        if buffer.numel():
            with peers.watch("checkpoint"):
                peers.broadcast_tensor(buffer.flatten().view(torch.uint8))
        tensor = buffer.permute([slot.order.index(i) for i in range(len(shape))])
        return slot.keep(tensor) if slot.keep else tensor

    with peers.watch("checkpoint"):
        outline = peers.broadcast_object(map_tree(tree, Tensor, put_slot))
    tensors = iter(sent)
    return map_tree(own_part(outline), Slot, fill_slot)
