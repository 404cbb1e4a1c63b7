"""A job of one process, as single and dataparallel are: its devices, and itself as the only one of its `Peers`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from recipes.common.errors import UserError

T = TypeVar("T")


class NoWatch:
    """Watch nothing: a single process waits for no other one."""

    def __call__(self, name: str, computes: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def follow(self, step: Callable[[], int], folder: Path | None) -> None:
        """Do nothing."""

    def take_stragglers(self) -> list[str]:
        """Return no warnings."""
        return []


class Alone:
    """A job of one process."""

    rank, world_size = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device, self.watch = device, NoWatch()

    def gather_objects(self, value: T) -> list[T]:
        """Return the value of the only rank."""
        return [value]

    def broadcast_object(self, value: T) -> T:
        """Return the value."""
        return value

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def sum_tensor(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def begin_vote(self, vote: int) -> Callable[[], int]:
        """Return a function that returns the vote."""
        return lambda: vote


def choose_devices(wanted: str) -> list[torch.device]:
    """Return the devices of a job of one process: all visible GPUs, or the CPU if there are none.

    Raises:
        UserError: --device is cuda, and no GPU is visible.
    """
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and not count:
        raise UserError("--device cuda: no GPU is visible; use --device cpu")
    return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
