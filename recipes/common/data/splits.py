"""A data set as recipes see it: two splits that yield batches by index. Also splits that are held in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from isal import isal_zlib
from torch import Tensor

from recipes.common.task import SKIPPED, Task

EVAL_BATCH_SIZE = 256
"""Most samples of an evaluation's pass; it never has more than a pass of training, so they fit in memory."""

CHUNK_VALUES = 2**18
"""Values that are normalised at a time on a CPU: 1 MB of float32, which stays in its cache."""

FINGERPRINT_PIXELS = 2**20
"""At least this many values of a split, evenly spaced, go into its digest, which takes a millisecond."""

MORE_TRIED = 30
"""Samples that Data.examples() reads in addition if some of the first ones do not count."""

Batch = tuple[Tensor, Tensor]
"""Inputs and targets of B samples, on the device.

Images are float32 of shape (B, C, H, W) and normalised, their labels int64 of shape (B,); text is int64 of shape
(B, T), and so are its targets, one position further.
"""

RawSplits = tuple[Batch, Batch]
"""Training and test images as uint8 (N, C, H, W), each with int64 labels (N,)."""


class Split(ABC):
    """The training or the test split of a data set."""

    skipped = 0
    """Images left out so far because they do not decode."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that identifies this split: its size, and a digest of what is in memory of it."""

    def take_warnings(self, train_s: float) -> list[str]:
        """Return the warnings since the last call; `train_s` is the training time so far, in seconds."""
        return []

    def storage_order(self) -> Tensor:
        """Return the samples' indices in storage order: int64, shape (N,)."""
        return torch.arange(len(self))

    @abstractmethod
    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor, in order; the epoch seeds the augmentation.

        Consume all batches of a call before the next call: the workers serve one caller at a time.
        """

    def unreported(self) -> Split:
        """Return this split, whose samples that cannot be read are neither counted nor reported."""
        return self


class Spec(NamedTuple):
    """The shape and dtype of one sample's input or target."""

    shape: tuple[int, ...]
    """Without the batch dimension."""
    dtype: torch.dtype

    def zeros(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Return a batch of zeros."""
        return torch.zeros(count, *self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {self.shape}"


@dataclass(frozen=True)
class Data:
    """A data set: its two splits, the shapes that a model has to fit, and the task."""

    train: Split
    test: Split
    input: Spec
    target: Spec
    num_classes: int | None
    """Number of classes or of different tokens; None if targets are values."""
    kind: str = "class"
    """The kind of targets: class, tokens, bytes (tokens with 256 different values) or values."""
    task: Task = field(default_factory=Task)
    classes: Sequence[str] = ()
    """The classes' names, in the order of their numbers, if they have any."""
    fingerprints: dict[str, Any] = field(default_factory=dict)
    """A string that identifies each split: all ranks have the same ones, and all launches of a run should.

    Also `classes`, if they have names.
    """
    may_skip: bool = False
    """Whether targets may be SKIPPED."""

    @classmethod
    def of_images(cls, train: Split, test: Split, channels: int, image_size: int, num_classes: int) -> Data:
        """Return a data set of square images with a class each."""
        shape = (channels, image_size, image_size)
        return cls(train, test, Spec(shape, torch.float32), Spec((), torch.int64), num_classes)

    def examples(self, count: int) -> Batch:
        """Return the first training samples, or all if there are fewer, on the CPU, for checks of a model.

        Samples that do not count, such as damaged images, are left out if others of the first ones replace them.
        """

        def read(number: int) -> Batch:
            indices = torch.arange(min(number, len(self.train)))
            ((inputs, targets),) = self.train.unreported().batches([indices], 0)
            return inputs.cpu(), targets.cpu()

        inputs, targets = read(count)
        if self.kind != "values" and skipped(targets).any():
            inputs, targets = read(count + MORE_TRIED)
            chosen = skipped(targets).int().argsort(stable=True)[:count]  # first those that count
            inputs, targets = inputs[chosen], targets[chosen]
        return inputs, targets

    @property
    def has_images(self) -> bool:
        """Whether a sample is a square image with a class."""
        shape = self.input.shape
        is_image = len(shape) == 3 and shape[1] == shape[2] and self.input.dtype.is_floating_point
        return is_image and self.kind == "class"

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.input.shape[0]

    @property
    def image_size(self) -> int:
        """Side of an image, in pixels."""
        return self.input.shape[1]


def skipped(targets: Tensor) -> Tensor:
    """Return a bool mask (B,): True for samples without a target that counts."""
    return (targets == SKIPPED).reshape(len(targets), -1).all(dim=1)


class Normalise:
    """Subtract the mean and divide by the standard deviation: float32, shape (C,), in units of the raw pixels.

    Images have this `width` and `device`; with `channels_last`, the result is in that memory format.
    """

    def __init__(
        self, mean: Tensor, std: Tensor, width: int, device: torch.device, channels_last: bool = False
    ) -> None:
        # For a whole row of an image: one or three channels alone are too short for vector instructions.
        self.scale = (1 / std).repeat(width).to(device)
        self.shift = (-mean / std).repeat(width).to(device)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, pixels: Tensor) -> Tensor:
        """Map uint8 (B, H, W, C) to float32 (B, C, H, W)."""
        rows = pixels.flatten(2)
        result = torch.empty(rows.shape, device=pixels.device)
        count = max(1, CHUNK_VALUES // rows.shape[1:].numel() if pixels.device.type == "cpu" else len(rows))
        for some, place in zip(rows.split(count), result.split(count), strict=True):
            torch.addcmul(self.shift, some.float(), self.scale, out=place)
        return result.view(pixels.shape).permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)


class MemorySplit(Split):
    """Samples that are held on the device; prepare() turns selected inputs into a batch."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs
    ) -> None:
        self.inputs, self.targets, self.prepare = inputs, targets, prepare

    def __len__(self) -> int:
        return len(self.targets)

    def fingerprint(self) -> str:
        """Return a string that identifies this split: its size and a digest of all of it."""
        return f"{len(self)} samples with digest {digest(self.inputs, self.targets):08x}"

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor."""
        for index in indices:
            index = index.to(self.targets.device, non_blocking=True)
            inputs = self.inputs.index_select(0, index)  # 7 times as fast as [index] on a CPU
            yield self.prepare(inputs), self.targets.index_select(0, index)


class TensorSplit(MemorySplit):
    """Images on the device: uint8 (N, C, H, W), with int64 labels (N,); mean and std as for Normalise."""

    def __init__(
        self, images: Tensor, labels: Tensor, mean: Tensor, std: Tensor, channels_last: bool = False
    ) -> None:
        normalise = Normalise(mean, std, images.shape[3], images.device, channels_last)
        super().__init__(images.permute(0, 2, 3, 1).contiguous(), labels, normalise)

    def fingerprint(self) -> str:
        """Return a string that identifies this split: its size, and a digest of the labels and of some pixels."""
        some = self.inputs.flatten()[:: max(1, self.inputs.numel() // FINGERPRINT_PIXELS)]
        return f"{len(self)} samples with digest {digest(self.targets, some):08x}"


def digest(*tensors: Tensor) -> int:
    """Return the CRC-32 of the bytes of all tensors, one after another."""
    checksum = 0
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
        checksum = isal_zlib.crc32(plain.flatten().view(torch.uint8).numpy().data, checksum)
    return checksum
