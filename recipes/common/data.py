"""Data sets, and batches of them by index: a recipe decides which indices are its rank's share.

Small data sets live on the device as one uint8 tensor and are batched by indexing it; folders of
images are decoded in worker processes (imagefolder.py). Either way a recipe sees a `Split`.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import importlib.util
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from recipes.common.errors import UserError
from recipes.common.options import Options

if TYPE_CHECKING:
    from recipes.common.imagefolder import Listing

SKIPPED = -100
"""Label of a sample that does not count: cross_entropy's default ignore_index."""

EVAL_BATCH_SIZE = 256
"""Samples of one evaluation batch; it bounds memory and changes no result."""

CACHED = 2**18
"""Pixels that are normalised at a time on a CPU: 1 MB of them, as float32, stay in its cache."""

FINGERPRINT_PIXELS = 2**20
"""At least so many pixels of a split, at equal distances, go into its digest: a millisecond."""

Batch = tuple[Tensor, Tensor]
"""Images, float32 of shape (B, C, H, W) and normalised, and labels, int64 of shape (B,)."""


class Split(Protocol):
    """The training or the test half of a data set."""

    skipped: int
    """Images left out so far because they do not decode."""

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Return what tells this split from another: its size, and a digest of samples in memory."""

    def idle_s(self) -> float:
        """Return for how long the device has had nothing to do but to wait for batches."""

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor, in order; the epoch seeds the augmentation.

        Call it again only when done with what it gave before: workers serve one caller.
        """


@dataclass(frozen=True)
class Data:
    """A data set: two splits, and what a model has to fit."""

    train: Split
    test: Split
    channels: int
    image_size: int
    num_classes: int


class Normalise:
    """Subtract the mean and divide by the standard deviation.

    Args:
        mean, std: float32, shape (C,), in units of the raw pixels.
        width: of the images.
        device: where the images are.
    """

    def __init__(self, mean: Tensor, std: Tensor, width: int, device: torch.device) -> None:
        # A row of an image at a time: channels alone, one or three, are too short for vector instructions.
        self.scale = (1 / std).repeat(width).to(device)
        self.shift = (-mean / std).repeat(width).to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Map uint8 (B, H, W, C) to float32 (B, C, H, W), channels last in memory."""
        rows = pixels.flatten(2)
        result = torch.empty(rows.shape, device=pixels.device)
        # On a CPU so much at a time as its cache holds.
        at_once = CACHED // rows.shape[1:].numel() if pixels.device.type == "cpu" else len(rows)
        count = max(1, at_once)
        for some, place in zip(rows.split(count), result.split(count), strict=True):
            torch.addcmul(self.shift, some.float(), self.scale, out=place)
        return result.view(pixels.shape).permute(0, 3, 1, 2)


class TensorSplit:
    """Samples that live on the device.

    Args:
        images: uint8, shape (N, C, H, W).
        labels: int64, shape (N,).
        mean, std: float32, shape (C,), in units of the raw pixels.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, mean: Tensor, std: Tensor, channels_last: bool = False
    ) -> None:
        self.pixels = images.permute(0, 2, 3, 1).contiguous()
        self.labels = labels
        self.normalise = Normalise(mean, std, images.shape[3], images.device)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.skipped = 0

    def __len__(self) -> int:
        return len(self.labels)

    def idle_s(self) -> float:
        """Return 0: the samples are on the device."""
        return 0.0

    def fingerprint(self) -> str:
        """Return what tells this split from another: its size, and a digest of the labels and of some pixels."""
        some = self.pixels.flatten()[:: max(1, self.pixels.numel() // FINGERPRINT_PIXELS)]
        digest = zlib.crc32(some.cpu().numpy().tobytes(), zlib.crc32(self.labels.cpu().numpy().tobytes()))
        return f"{len(self)} samples with digest {digest:08x}"

    @property
    def images(self) -> Tensor:
        """The raw images: uint8, shape (N, C, H, W)."""
        return self.pixels.permute(0, 3, 1, 2)

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor."""
        for index in indices:
            index = index.to(self.labels.device, non_blocking=True)
            images = self.normalise(self.pixels.index_select(0, index))  # on a CPU 7 times as fast as [index]
            yield images.contiguous(memory_format=self.memory_format), self.labels[index]


def load_data(
    args: Options,
    device: torch.device,
    on_bad_image: Callable[[UserError], None],
    listing: Listing | None = None,
) -> Data:
    """Return the data set of --data with its small tensors on the device.

    `on_bad_image` is told of an image that does not decode, unless --skip-bad-images counts it. It must not
    raise: the batch is delivered with that sample blank, so that this rank can go on taking part in its
    collectives until all ranks stop together. `listing` holds the images of a folder that rank 0 has walked.

    Raises:
        UserError: data that are missing, empty or malformed.
    """
    if args.data == "imagefolder":
        from recipes.common.imagefolder import load_imagefolder

        return load_imagefolder(args, device, on_bad_image, listing)
    load = {"digits": _digits, "synthetic": _synthetic}.get(args.data, _torchvision)
    (train_images, train_labels), (test_images, test_labels) = load(args)
    pixels = train_images.transpose(0, 1).flatten(1).float()
    mean, std = pixels.mean(dim=1), pixels.std(dim=1).clamp(min=1e-6)

    def split(images: Tensor, labels: Tensor) -> TensorSplit:
        return TensorSplit(images.to(device), labels.to(device), mean, std, args.channels_last)

    return Data(
        train=split(train_images, train_labels),
        test=split(test_images, test_labels),
        channels=train_images.shape[1],
        image_size=train_images.shape[2],
        num_classes=int(train_labels.max()) + 1,
    )


RawSplits = tuple[Batch, Batch]
"""Training and test images as uint8 (N, C, H, W), each with int64 labels (N,)."""


def _digits(args: Options) -> RawSplits:
    """Return the UCI handwritten digits that scikit-learn carries: 1,797 real images of 8x8, 10 classes.

    Source: E. Alpaydin and C. Kaynak, https://doi.org/10.24432/C50P49 (CC BY 4.0).
    """
    # The file is read where it lies: importing scikit-learn would cost each rank over a second.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("--data digits needs scikit-learn; install it with `pip install scikit-learn`")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rb") as file:
            values = np.array([line.split(b",") for line in file.read().split()], dtype=np.float32)
    except OSError as error:
        raise UserError(f"--data digits: cannot read {path}: {error}; reinstall scikit-learn") from None
    images = torch.from_numpy(values[:, :64]).to(torch.uint8).view(-1, 1, 8, 8)
    labels = torch.from_numpy(values[:, 64]).long()
    # The file is sorted by writer: shuffle once, the same for every --seed, and hold out a fifth.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return (images[train], labels[train]), (images[test], labels[test])


def _synthetic(args: Options) -> RawSplits:
    """Return random images with random labels of 1,000 classes (fewer where samples are fewer)."""
    generator = torch.Generator().manual_seed(0)
    num_classes = min(1000, args.num_samples)

    def draw(count: int) -> Batch:
        shape = (count, 3, args.image_size, args.image_size)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return images, torch.arange(count) % num_classes

    return draw(args.num_samples), draw(max(1, args.num_samples // 8))


def _torchvision(args: Options) -> RawSplits:
    """Return Fashion-MNIST (60,000 + 10,000 of 1x28x28) or CIFAR-10 (50,000 + 10,000 of 3x32x32)."""
    from torchvision import datasets  # over a second: paid only by the data sets that need it

    load = {"fashion-mnist": datasets.FashionMNIST, "cifar10": datasets.CIFAR10}[args.data]

    def read(train: bool) -> Batch:
        with _one_process_at_a_time(args.data_dir, enabled=args.download):
            dataset = load(str(args.data_dir), train=train, download=args.download)
        images = torch.as_tensor(dataset.data)
        labels = torch.as_tensor(dataset.targets, dtype=torch.int64)
        return (images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)), labels

    try:
        return read(train=True), read(train=False)
    except OSError as error:  # a failed download is a URLError, which is an OSError
        raise UserError(f"--data {args.data} from --data-dir {args.data_dir}: {error}") from None
    except RuntimeError:  # torchvision's "not found or corrupted"
        raise UserError(
            f"--data {args.data} is missing or damaged in --data-dir {args.data_dir}; add --download to fetch it"
        ) from None


@contextlib.contextmanager
def _one_process_at_a_time(folder: Path, enabled: bool) -> Iterator[None]:
    """Let one rank of a node download while the others wait; they then find the files in place."""
    if not enabled:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".download.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
