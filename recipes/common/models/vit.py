"""--model vit-tiny: a small vision transformer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

WIDTH, DEPTH, HEADS = 64, 6, 4


class VisionTransformer(nn.Module):
    """A small vision transformer for square images of any size: at most 8 x 8 patches, pre-norm blocks.

    Source: Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929, with the mean of all tokens instead of
    a class token as in Beyer et al. 2022, https://arxiv.org/abs/2205.01580.
    """

    is_sequence = True

    def __init__(self, channels: int, image_size: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = PatchEmbedding(channels, image_size, WIDTH)
        blocks = [
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(DEPTH)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(MeanToken(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, S, S) to logits (B, num_classes)."""
        return self.head(self.blocks(self.embedding(images)))


class PatchEmbedding(nn.Module):
    """Map images (B, C, S, S) to tokens (B, patches, width) with position embeddings."""

    def __init__(self, channels: int, image_size: int, width: int) -> None:
        super().__init__()
        patch = max(2, math.ceil(image_size / 8))  # 8 pixels: 4 x 4 patches of 2; 224: 8 x 8 of 28
        side = math.ceil(image_size / patch)
        padding = math.ceil((side * patch - image_size) / 2)
        self.project = nn.Conv2d(channels, width, kernel_size=patch, stride=patch, padding=padding)
        self.position = nn.Parameter(0.02 * torch.randn(1, side * side, width))

    def forward(self, images: Tensor) -> Tensor:
        """Cut images into patches, project each patch, and add its position embedding."""
        return self.project(images).flatten(2).transpose(1, 2) + self.position


class MeanToken(nn.Module):
    """Average tokens (B, T, width) to (B, width)."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean of the tokens."""
        return tokens.mean(dim=1)
