"""Causal attention over sequences that ranks divide: queries are local, keys and values are gathered.

A sequence is cut into 2N chunks, and rank r of N has chunks r and 2N-1-r. A chunk attends to the keys up to its
end: r + 1 chunks for the first and 2N - r for the second, 2N + 1 on every rank, so that all do the same work.

Source: Dubey et al. 2024, The Llama 3 Herd of Models, section 3.3.2, https://arxiv.org/abs/2407.21783. Ring
attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889) passes keys and values around the ranks instead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.nn.functional import scaled_dot_product_attention

from recipes.common.models.attention import SequenceSharding


def make_sequence_sharding(mesh: DeviceMesh) -> SequenceSharding:
    """Return how the ranks of a replica divide the sequences of a model that calls causal_attention()."""
    return SequenceSharding(partial(attend, mesh), partial(own_positions, mesh))


def take_whole_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make a model whose attention is divided take whole sequences, and return all logits on every rank."""
    model.register_forward_pre_hook(lambda _, inputs: (shard_sequence(inputs[0], mesh, 1),))
    model.register_forward_hook(lambda _, inputs, logits: gather_sequence(logits, mesh, 1))


def shard_sequence(whole: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's two chunks of the dimension that counts a sequence's positions: T -> T / N."""
    chunks, rank = whole.chunk(2 * mesh.size(), dim), mesh.get_local_rank()
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def gather_sequence(part: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Return the whole of what shard_sequence() has divided, in order: T / N -> T.

    The gradient of a part is the sum of all ranks' gradients of it. Call it on all ranks of a replica.
    """
    # Context: an all-gather, (N-1)/N of the whole's bytes; in backward, a reduce-scatter of as many.
    whole = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
    chunks = whole.full_tensor(grad_placements=[Partial()]).chunk(2 * mesh.size(), dim)
    return torch.cat(chunks[::2] + chunks[::-2], dim)  # the ranks' first chunks, then backwards their second ones


def own_positions(mesh: DeviceMesh, length: int, device: torch.device | None) -> Tensor:
    """Return the places in the whole sequence of this rank's positions, `length` of them."""
    return shard_sequence(torch.arange(mesh.size() * length, device=device), mesh, 0)


def attend(mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """Let this rank's two chunks of queries attend to all keys before them: (B, heads, T / N, size) each.

    `more` goes to scaled_dot_product_attention().
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()
    if torch.is_autocast_enabled(q.device.type):  # a bias hides the call from autocast
        q, k, v = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (q, k, v))
    k, v = gather_sequence(torch.stack((k, v)), mesh, 3)
    mixed, size = [], q.shape[2] // 2
    for chunk, queries in zip((rank, 2 * ranks - 1 - rank), q.chunk(2, 2), strict=True):
        end = size * (chunk + 1)
        bias = causal_bias(size, end)
        mixed.append(scaled_dot_product_attention(queries, k[:, :, :end], v[:, :, :end], bias, **more))
    return torch.cat(mixed, 2)


def causal_bias(queries: int, keys: int) -> CausalBias:
    """Return torch's causal_lower_right(): the last query sees all keys, the one before it one less, and so on.

    CausalBias() itself, in torch 2.14, allocates 2 x queries x keys numbers in main memory, which it never reads.
    """
    bias = torch.empty(0).as_subclass(CausalBias)
    bias.variant, bias.seq_len_q, bias.seq_len_kv = CausalVariant.LOWER_RIGHT, queries, keys
    return bias
