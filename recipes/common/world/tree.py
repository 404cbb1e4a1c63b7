"""Send a checkpoint's content from rank 0 to all ranks, a tensor at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.common.world.peers import Peers


class Slot(NamedTuple):
    """A placeholder for a tensor in a tree that is sent before its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    """The dimensions by descending stride: in this order the tensor is contiguous."""
    keep: Callable[[Tensor], Tensor] | None = None
    """Returns the part of the tensor that this rank keeps; None: keep all of it."""


def map_tree(tree: Any, is_leaf: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples in which change(value) replaces each leaf."""
    if is_leaf(tree):
        return change(tree)
    if isinstance(tree, dict):
        changed = copy.copy(tree)  # of its class, with its attributes: a module's state_dict() has versions there
        for key, value in tree.items():
            changed[key] = map_tree(value, is_leaf, change)
        return changed
    if isinstance(tree, list | tuple):
        return type(tree)(map_tree(value, is_leaf, change) for value in tree)
    return tree


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

    with peers.watch("checkpoint"), torch.serialization.safe_globals([Slot]):
        outline = peers.broadcast_object(map_tree(tree, torch.is_tensor, put_slot))
    tensors = iter(sent)
    return map_tree(own_part(outline), lambda value: isinstance(value, Slot), fill_slot)
