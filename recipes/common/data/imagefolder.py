"""Images in folders, ImageNet's layout: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg.

Each sample's crop and flip are drawn from a seed of (--seed, epoch, index): the same image comes out
whichever rank or worker process decodes it, and after a resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import socket
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from recipes.common.data.images import BAD_IMAGE, Box, decode, decodes_parts, read
from recipes.common.data.splits import Batch, Data, Normalise
from recipes.common.data.workers import LoadedSplit, start_server
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.seeding import mix
from recipes.common.task import SKIPPED

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")

MEAN = torch.tensor([0.485, 0.456, 0.406]) * 255
STD = torch.tensor([0.229, 0.224, 0.225]) * 255
"""ImageNet's mean and standard deviation per channel, in units of the raw pixels."""

MAX_WARNINGS = 10

SCALE, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Of random-resized crops: the share of the image's area, width over height, draws before the centre is taken."""


class Decoded(NamedTuple):
    """One sample as a worker process hands it over."""

    image: Tensor
    """uint8, shape (S, S, 3)."""
    label: int
    fault: str
    """Why the image does not decode, with its path; empty when it does."""
    is_unread: bool = False
    """The fault is that of the file system: it proves nothing against the image."""


class Images(Dataset[Decoded], ABC):
    """Decode by (epoch, index); an image that does not decode comes back blank, with its fault."""

    labels: Tensor
    """int64, shape (N,)."""

    def __init__(self, image_size: int, seed: int, train: bool) -> None:
        self.image_size, self.seed, self.train = image_size, seed, train

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def path(self, index: int) -> str:
        """Return where an image is, for people."""

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return an image's file; raises OSError where it cannot be read, ValueError where it is damaged."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return what identifies the images."""

    def __getitem__(self, key: tuple[int, int]) -> Decoded:
        epoch, index = key
        try:
            content = self.read(index)
            if self.train:
                image = self._random_crop(content, mix(self.seed, epoch, index))
            else:
                image = centre_crop(decode(content, whole), self.image_size)
        except BAD_IMAGE as error:
            blank = torch.zeros(self.image_size, self.image_size, 3, dtype=torch.uint8)
            path = self.path(index)
            if isinstance(error, OSError) and error.errno is not None:  # Pillow's own have no errno
                return Decoded(blank, SKIPPED, f"cannot read {path}: {error.strerror}", is_unread=True)
            return Decoded(blank, SKIPPED, f"{path} does not decode ({error})")
        return Decoded(image, int(self.labels[index]), "")

    def _random_crop(self, content: bytes, seed: int) -> Tensor:
        part = decode(content, lambda width, height: random_box(width, height, random.Random(seed)))
        image = resize(part, self.image_size, self.image_size)
        # A coin of its own: the box draws as many numbers as it needs.
        return image.flip(1) if mix(seed) & 1 else image


class ImageFolder(Images):
    """An image per file; the samples' paths are those below `folder`."""

    def __init__(
        self, samples: list[tuple[str, int]], image_size: int, seed: int, train: bool, folder: str | Path = ""
    ) -> None:
        super().__init__(image_size, seed, train)
        self.folder = folder
        # Tensors lie in memory that all workers of a rank share; of a million paths each would have its own.
        paths = [os.fsencode(path) for path, _ in samples]
        self.paths = torch.frombuffer(bytearray(b"".join(paths)), dtype=torch.uint8)
        self.ends = torch.tensor([len(path) for path in paths]).cumsum(0)
        self.labels = torch.tensor([label for _, label in samples])

    def path(self, index: int) -> str:
        """Return the path of an image."""
        begin, end = int(self.ends[index - 1]) if index else 0, int(self.ends[index])
        return os.path.join(self.folder, os.fsdecode(self.paths[begin:end].numpy().tobytes()))

    def read(self, index: int) -> bytes:
        """Return an image's file."""
        return read(self.path(index))

    def fingerprint(self) -> str:
        """Return what identifies the images."""
        digest = zlib.crc32(self.labels.numpy().tobytes(), zlib.crc32(self.paths.numpy().data))
        return f"{len(self)} images with digest {digest:08x} of names and classes"


def random_box(width: int, height: int, chance: random.Random) -> Box:
    """Draw the box of a random-resized crop, distributed as that of torchvision's RandomResizedCrop.

    Source: Szegedy et al. 2014, Going deeper with convolutions, https://arxiv.org/abs/1409.4842.
    """
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(TRIES):
        area = width * height * chance.uniform(*SCALE)
        ratio = math.exp(chance.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(chance.randint(0, width - w), chance.randint(0, height - h), w, h)
    # Long and narrow: its centre, with the nearest ratio.
    ratio = min(max(width / height, RATIO[0]), RATIO[1])
    w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
    return Box((width - w) // 2, (height - h) // 2, w, h)


def whole(width: int, height: int) -> Box:
    """Return the box of the whole image."""
    return Box(0, 0, width, height)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Scale uint8 pixels (H, W, 3) to (height, width, 3) as Pillow does: bilinear, smoothed where it shrinks."""
    planes = pixels.unsqueeze(0).permute(0, 3, 1, 2)  # a view, channels last: that kernel is the fast one
    scaled = interpolate(planes, (height, width), mode="bilinear", antialias=True)
    return scaled.permute(0, 2, 3, 1)[0]


def centre_crop(pixels: Tensor, size: int) -> Tensor:
    """Return ImageNet's customary view for evaluation: the shorter side to 256/224 of size, then the centre."""
    height, width = pixels.shape[:2]
    short = round(size * 256 / 224)
    # The longer side is rounded down, as torchvision's Resize does it.
    rows = short if height <= width else int(short * height / width)
    columns = short if width <= height else int(short * width / height)
    top, left = round((rows - size) / 2), round((columns - size) / 2)
    return resize(pixels, rows, columns)[top : top + size, left : left + size]


class ImageSplit(LoadedSplit):
    """Batches decoded by --workers processes and normalised on the device."""

    def __init__(
        self,
        dataset: Images,
        args: Options,
        device: torch.device,
        on_bad_image: Callable[[UserError], None],
        context: BaseContext | None,
    ) -> None:
        super().__init__(dataset, args.workers, device, context, args.timeout_s, _collate)
        self.args, self.on_bad_image = args, on_bad_image
        self.normalise = Normalise(MEAN, STD, args.image_size, device)
        self.memory_format = torch.channels_last if args.channels_last else torch.contiguous_format

    def fingerprint(self) -> str:
        """Return what identifies this split."""
        return str(self.dataset.fingerprint())

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor that is not empty (the share of a rank too many is)."""
        for images, labels, faults in self.load(indices, epoch):
            for fault, is_unread in faults:
                self._report(fault, is_unread)
            images = self.normalise(images.to(self.device, non_blocking=True))
            yield images.contiguous(memory_format=self.memory_format), labels.to(self.device, non_blocking=True)

    def _report(self, fault: str, is_unread: bool) -> None:
        if is_unread:
            self.on_bad_image(UserError(f"{fault}; fix this, then add --resume auto"))
            return
        if not self.args.skip_bad_images:
            self.on_bad_image(UserError(f"{fault}; fix or remove it, or add --skip-bad-images"))
            return
        self.skipped += 1
        if self.skipped <= MAX_WARNINGS:
            print(f"warning: skipped {fault}", file=sys.stderr, flush=True)


def _collate(samples: list[Decoded]) -> tuple[Tensor, Tensor, list[tuple[str, bool]]]:
    images = torch.stack([sample.image for sample in samples])
    labels = torch.tensor([sample.label for sample in samples])
    return images, labels, [(sample.fault, sample.is_unread) for sample in samples if sample.fault]


@dataclass(frozen=True)
class Listing:
    """The images below a folder: every rank needs the same, in the same order, and one of them walks."""

    train: list[tuple[str, int]]
    """Path below the folder, with slashes, and label of each image."""
    test: list[tuple[str, int]]
    num_classes: int
    state: str
    """Digest of the inodes and times of the class folders: whoever sees the same ones need not walk again."""

    def to_text(self) -> str:
        """Return all of it as one text, which ranks exchange faster than a million tuples."""
        return json.dumps(vars(self))

    @classmethod
    def from_text(cls, text: str) -> Listing:
        """Return what `to_text` was called on."""
        fields = json.loads(text)
        for name in ("train", "test"):
            fields[name] = [(path, label) for path, label in fields[name]]
        return cls(**fields)


def walk(folder: Path) -> Listing:
    """Find all images below a folder.

    Raises:
        UserError: a folder is missing or cannot be read, no class folders or images, or a class that only val has.
    """
    state = _state(folder)
    train, classes = _scan(folder, "train")
    test, test_classes = _scan(folder, "val")
    unknown = sorted(set(test_classes) - set(classes))
    if unknown:
        raise UserError(f"{folder / 'val'} has the class {unknown[0]!r}, which train does not have; remove it")
    number = {name: i for i, name in enumerate(classes)}

    def numbered(samples: list[tuple[str, str]]) -> list[tuple[str, int]]:
        return [(path, number[name]) for path, name in samples]

    return Listing(numbered(train), numbered(test), len(classes), state)


def check_listing(listing: Listing, folder: Path) -> None:
    """Compare this rank's folder with the one that rank 0 has walked.

    Raises:
        UserError: with the first image that one of the two lacks.
    """
    if _state(folder) == listing.state:
        return
    own = walk(folder)
    for ours, theirs in ((own.train, listing.train), (own.test, listing.test)):
        if ours == theirs:
            continue
        here, there = {path for path, _ in ours}, {path for path, _ in theirs}
        path = min(here ^ there, default="")
        lack = f"has {path}, which rank 0 lacks" if path in here else f"lacks {path}, which rank 0 has"
        raise UserError(f"--data-dir {folder} on {socket.gethostname()} {lack}; give all nodes the same images")


def load_imagefolder(
    args: Options, device: torch.device, on_bad_image: Callable[[UserError], None], listing: Listing | None = None
) -> Data:
    """Return the images below --data-dir; the listing is that of rank 0, if another rank has walked.

    Raises:
        UserError: as walk() and check_listing().
    """
    if listing:
        check_listing(listing, args.data_dir)
    else:
        listing = walk(args.data_dir)

    def dataset(samples: list[tuple[str, int]], is_train: bool) -> ImageFolder:
        return ImageFolder(samples, args.image_size, args.seed, is_train, args.data_dir)

    halves = dataset(listing.train, True), dataset(listing.test, False)
    return data_of(halves, listing.num_classes, args, device, on_bad_image)


def data_of(
    halves: tuple[Images, Images],
    num_classes: int,
    args: Options,
    device: torch.device,
    on_bad_image: Callable[[UserError], None],
) -> Data:
    """Return training and test images as data whose splits --workers processes decode."""
    if not decodes_parts() and os.environ.get("RANK", "0") == "0":
        print("note: no nvImageCodec here: Pillow decodes whole images, which takes longer", file=sys.stderr)
    context = start_server() if args.workers else None
    train, test = (ImageSplit(dataset, args, device, on_bad_image, context) for dataset in halves)
    return Data.of_images(train, test, 3, args.image_size, num_classes)


def _state(folder: Path) -> str:
    """Return a digest that is the same wherever the same folder is mounted, until an image comes or goes."""
    digest = hashlib.sha256()
    for name in ("train", "val"):
        with contextlib.suppress(OSError):  # walk() says what is missing
            entries = [(entry.name, entry.stat()) for entry in os.scandir(folder / name) if entry.is_dir()]
            for entry, stat in sorted(entries, key=lambda item: item[0]):
                digest.update(os.fsencode(f"{name}/{entry} {stat.st_ino} {stat.st_mtime_ns}\n"))
    return digest.hexdigest()


def _refuse_folder(error: OSError) -> NoReturn:
    """Raise the error of a folder below a class, which os.walk() would pass over as if it were empty."""
    fix = "make it readable for this user, or remove it"
    raise UserError(f"--data-dir: cannot read {error.filename} ({error.strerror}); {fix}")


def is_hidden(name: str) -> bool:
    """Whether a file or folder is one that tools leave: .ipynb_checkpoints, ._photo.jpg of macOS, .Trash."""
    return name.startswith(".")


def _scan(folder: Path, half: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (path below the folder, class name) of the images below half/CLASS, sorted, and the sorted names."""
    root = folder / half
    layout = "imagefolder expects DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg"
    try:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not is_hidden(entry.name))
    except OSError as error:
        raise UserError(f"--data-dir: cannot read {root} ({error.strerror}); {layout}") from None
    if not classes:
        raise UserError(f"--data-dir: {root} has no class folders; {layout}")
    samples = []
    for name in classes:
        found = []
        for place, folders, files in os.walk(root / name, onerror=_refuse_folder, followlinks=True):
            folders[:] = [inner for inner in folders if not is_hidden(inner)]
            images = [file for file in files if file.lower().endswith(EXTENSIONS) and not is_hidden(file)]
            found += [os.path.relpath(os.path.join(place, file), folder) for file in images]
        if not found:
            raise UserError(f"--data-dir: {root / name} has no images ({', '.join(EXTENSIONS)}); remove it")
        samples += [(path, name) for path in sorted(found)]
    return samples, classes
