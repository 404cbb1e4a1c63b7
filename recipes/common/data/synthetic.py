"""--data synthetic: random images, for speed and memory without a disk."""

from __future__ import annotations

import torch

from recipes.common.data.splits import Batch, RawSplits
from recipes.common.options import Options


def draw_images(args: Options) -> RawSplits:
    """Return random images whose labels cycle through 1,000 classes (fewer if there are fewer samples)."""
    generator = torch.Generator().manual_seed(0)
    num_classes = min(1000, args.num_samples)

    def draw(count: int) -> Batch:
        shape = (count, 3, args.image_size, args.image_size)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return images, torch.arange(count) % num_classes

    return draw(args.num_samples), draw(max(1, args.num_samples // 8))
