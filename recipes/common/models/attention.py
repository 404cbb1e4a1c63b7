"""Causal attention for a model of your own, whose sequences ranks may divide: recipes/context makes them do so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class SequenceSharding:
    """How a rank that has a part of each sequence does what the two functions below do for a whole one."""

    attend: Callable[..., Tensor]
    """Takes what causal_attention() takes, each of this rank's positions."""
    positions: Callable[[int, torch.device | None], Tensor]


_sharding: SequenceSharding | None = None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).

    Shapes are (B, heads, T, size); keys and values are alike, and may have fewer heads than queries. If the ranks
    of a replica divide the sequences, they exchange keys and values: call it on all of them.
    """
    more: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if _sharding is None:
        return scaled_dot_product_attention(q, k, v, is_causal=True, **more)
    return _sharding.attend(q, k, v, **more)


def positions(length: int, device: torch.device | None = None) -> Tensor:
    """Return the place in the whole sequence of each position that the model gets: int64, shape (length,)."""
    return _sharding.positions(length, device) if _sharding else torch.arange(length, device=device)


@contextlib.contextmanager
def use_sequence_sharding(sharding: SequenceSharding | None) -> Iterator[None]:
    """Divide sequences in this block; None: take them as whole."""
    global _sharding
    before, _sharding = _sharding, sharding
    try:
        yield
    finally:
        _sharding = before
