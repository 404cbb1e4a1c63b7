"""All ranks of a job as one of them sees them, whatever connects them.

World (world.py) connects ranks by torch.distributed, the horovod recipe by Horovod.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from recipes.common.watch.watch import NoWatch

T = TypeVar("T")


class Peers:
    """The ranks of a job. All ranks have to call each method, in the same order.

    This class is a job of one process, as single and dataparallel are; a job of several overrides each method.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size, self.device = 0, 1, device
        self.watch = NoWatch()

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks."""
        return [value]

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value."""
        return value

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrite a tensor, on the CPU or on this rank's device, with rank 0's."""

    def sum_tensor(self, tensor: Tensor) -> None:
        """Overwrite a tensor, on the CPU or on this rank's device, with the sum of the ranks' tensors."""

    def begin_vote(self, vote: int) -> Callable[[], int]:
        """Send this rank's vote; return a function that waits for the others' and returns the largest."""
        return lambda: vote


def broadcast_bytes(tensor: Tensor, broadcast: Callable[[Tensor], object]) -> None:
    """Overwrite a tensor of any dtype with another rank's by a broadcast of bytes, which no library lacks."""
    own = local_tensor(tensor).detach()
    flat = own.contiguous().flatten()
    broadcast(flat.view(torch.uint8))
    if not own.is_contiguous():
        own.copy_(flat.view(own.shape))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor, or what this rank has of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def largest_part_bytes(tensor: Tensor) -> int:
    """Return the bytes of the largest part that a rank has of a DTensor: of n rows on m ranks, ceil(n / m)."""
    shape = list(tensor.shape)
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    for count, placement in zip(mesh.shape if mesh is not None else (), placements, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            shape[dim] = -(-shape[dim] // count)
    return math.prod(shape) * tensor.itemsize
