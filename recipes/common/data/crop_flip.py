"""--augment crop-flip: move and mirror images that are held on the device, as is usual for CIFAR-10.

Source: He et al. 2016, Deep residual learning, section 4.2, https://arxiv.org/abs/1512.03385.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from recipes.common.data.splits import Batch, TensorSplit
from recipes.common.seeding import hash_seed

PADDING = 4
"""Black pixels that are added on each side before a crop of the old size."""
PLACES = 2 * PADDING + 1
"""Places of a crop in each direction."""


class CropFlipSplit(TensorSplit):
    """A TensorSplit whose images are moved and mirrored: a function of (seed, epoch, index)."""

    def __init__(self, *args: Any, seed: int) -> None:
        super().__init__(*args)
        self.seed = seed

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor."""
        generator = torch.Generator().manual_seed(hash_seed(self.seed, epoch, 1))  # the order's has no 1
        draws = torch.randint(2 * PLACES**2, (len(self),), generator=generator).to(self.targets.device)
        for index in indices:
            index = index.to(self.targets.device, non_blocking=True)
            images = crop_flip(self.inputs.index_select(0, index), draws.index_select(0, index))
            yield self.prepare(images), self.targets.index_select(0, index)


def crop_flip(images: Tensor, draws: Tensor) -> Tensor:
    """Return images, uint8 (B, H, W, C), moved and mirrored as draws say: int64 (B,), below 2 * PLACES**2."""
    size, width = images.shape[:3], images.shape[2]
    top, left, is_mirrored = draws % PLACES, draws // PLACES % PLACES, draws // PLACES**2
    rows, columns = (torch.arange(length, device=images.device) for length in size[1:])
    columns = torch.where(is_mirrored.bool().unsqueeze(1), width - 1 - columns, columns)
    batch = torch.arange(size[0], device=images.device)
    padded = pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    rows = top.unsqueeze(1) + rows
    return padded[batch[:, None, None], rows[:, :, None], (left.unsqueeze(1) + columns)[:, None, :]]
