"""Send a tree of dicts, lists and tensors, as a checkpoint has: first its outline, then a tensor at a time."""

from __future__ import annotations

import copy
import math
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

    def new_bytes(self) -> Tensor:
        """Return memory on the CPU for the bytes of the tensor."""
        return torch.empty(math.prod(self.shape) * self.dtype.itemsize, dtype=torch.uint8)

    def tensor_of(self, content: Tensor) -> Tensor:
        """Return the tensor with these bytes."""
        ordered = content.view(self.dtype).view([self.shape[i] for i in self.order])
        return ordered.permute([self.order.index(i) for i in range(len(self.order))])


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


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions by descending stride."""
    return tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in the order in which they are in memory."""
    return tensor.permute(order_of(tensor)).contiguous().flatten().view(torch.uint8)


def outline_of(tree: Any) -> tuple[Any, list[Tensor]]:
    """Return a tree with a Slot in place of each tensor, and the tensors in the order of the slots."""
    tensors: list[Tensor] = []

    def put_slot(tensor: Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(tuple(tensor.shape), tensor.dtype, order_of(tensor))

    return map_tree(tree, torch.is_tensor, put_slot), tensors


def fill_slots(outline: Any, fill: Callable[[Slot], Tensor]) -> Any:
    """Return the tree of an outline, with fill(slot) in place of each slot, in order."""
    return map_tree(outline, lambda value: isinstance(value, Slot), fill)


def broadcast_tree(tree: Any, peers: Peers, own_shards: Callable[[Any], Any] | None = None) -> Any:
    """Return rank 0's tree of dicts, lists and tensors on the CPU; call it on all ranks.

    Tensors are sent one by one: besides the result, at most one tensor is in memory (on rank 0, the tree, too).
    `own_shards` gets the tree with a Slot for each tensor, and may set which part of each this rank keeps.
    """

    def fill(slot: Slot) -> Tensor:
        content = slot.new_bytes() if peers.rank else bytes_of(next(tensors))
        if len(content):
            with peers.watch("checkpoint"):
                peers.broadcast_tensor(content)
        tensor = slot.tensor_of(content)
        return slot.keep(tensor) if slot.keep else tensor

    outline, sent = outline_of(tree)
    with peers.watch("checkpoint"), torch.serialization.safe_globals([Slot]):
        outline = peers.broadcast_object(outline)
    tensors = iter(sent)
    return fill_slots(own_shards(outline) if own_shards else outline, fill)
