"""All ranks of a job as one of them sees them, whatever connects them.

World (world.py) connects ranks by torch.distributed, the horovod recipe by Horovod; alone.py is one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Waits(Protocol):
    """The object that is notified of each wait for other ranks: a Watch, or NoWatch."""

    def __call__(self, name: str, computes: bool = False) -> contextlib.AbstractContextManager[None]:
        """Enter a collective that all ranks enter; with `computes`, this rank also does work of its own in it."""

    def follow(self, step: Callable[[], int], folder: Path | None) -> None:
        """Get the current step from step(), and write reports to the run's folder."""

    def take_stragglers(self) -> list[str]:
        """Return the warnings about slow ranks since the last call."""


class Peers(Protocol):
    """All ranks of a job. All ranks have to call each method, in the same order."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    @property
    def device(self) -> torch.device:
        """This process's device."""

    @property
    def watch(self) -> Waits:
        """The object that is notified of each wait for the others."""

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks."""

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value."""

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor, on the CPU or on this rank's device, with rank 0's."""

    def sum_tensor(self, tensor: Tensor) -> None:
        """Overwrite a tensor with the sum of the ranks' tensors."""

    def begin_vote(self, vote: int) -> Callable[[], int]:
        """Send this rank's vote; return a function that waits for the others' and returns the largest."""
