"""A decoder-only transformer: pre-norm blocks, rotary positions, one matrix to embed and to predict tokens.

Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners (pre-norm GPT-2); Su et al. 2021,
https://arxiv.org/abs/2104.09864 (rotary positions); Press and Wolf 2017, https://arxiv.org/abs/1608.05859 (tied
embeddings).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.common.models.attention import causal_attention, positions

ROTARY_BASE = 10_000.0
"""The slowest pair of numbers rotates by 1 radian in about this many positions."""


class GPT(nn.Module):
    """Map tokens (B, T), int64, to logits (B, T, vocabulary) of the next token at each position.

    Args:
        vocabulary: number of different tokens.
        width: numbers per token; each head has width / heads of them, which has to be even.
    """

    is_sequence = True

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = TiedHead(self.embedding.weight)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # GPT-2: 2 * depth layers add to the residual stream, which should keep the variance of one layer.
                is_residual = name.endswith(("attention.project.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if is_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, T, vocabulary)."""
        return self.head(self.blocks(self.embedding(tokens)))


class TokenEmbedding(nn.Embedding):
    """Map tokens (B, T) to vectors (B, T, width)."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the tokens on their device: a pipeline may keep the matrix on the device of the head."""
        return functional.embedding(tokens, self.weight.to(tokens.device))


class TiedHead(nn.Module):
    """Map vectors (B, T, width) to logits (B, T, vocabulary) with the matrix that embeds tokens."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(weight.shape[1])
        self.weight = weight

    def forward(self, vectors: Tensor) -> Tensor:
        """Normalise, and multiply by the vector of each token."""
        return functional.linear(self.norm(vectors), self.weight.to(vectors.device))


class Block(nn.Module):
    """Attention and an MLP, each with normalised input, each added to the residual stream (B, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, stream: Tensor) -> Tensor:
        """Return the stream after this block: (B, T, width)."""
        stream = stream + self.attention(self.norm1(stream))
        return stream + self.mlp(self.norm2(stream))


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        """Mix each position of (B, T, width) with the positions before it."""
        # (B, T, 3 * width) -> three of (B, heads, T, width / heads)
        q, k, v = self.qkv(stream).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.project(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotate queries and keys, and mix the values: (B, heads, T, width / heads) each, and so is the result."""
        places = positions(q.shape[2], q.device)
        return causal_attention(rotate(q, places), rotate(k, places), v)


def rotate(vectors: Tensor, places: Tensor) -> Tensor:
    """Rotate each pair of numbers (i, i + D/2) of (..., T, D) by an angle that grows with the position.

    The positions, shape (T,), are on the device of the vectors.
    """
    speed = ROTARY_BASE ** -torch.arange(0, 1, 2 / vectors.shape[-1], device=places.device, dtype=torch.float32)
    angle = places.float()[:, None] * speed
    cos, sin = angle.cos().to(vectors.dtype), angle.sin().to(vectors.dtype)
    x, y = vectors.chunk(2, dim=-1)
    return torch.cat((x * cos - y * sin, x * sin + y * cos), dim=-1)
