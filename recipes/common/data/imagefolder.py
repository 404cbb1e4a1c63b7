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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from recipes.common.data.gpu_decode import BatchDecoder, Encoded, PartDecoder, collate, encode, encode_pixels
from recipes.common.data.images import BAD_IMAGE, CropBox, decode, find_part, import_nvimgcodec, read
from recipes.common.data.splits import Data, Normalise, digest
from recipes.common.data.workers import LoadedSplit, Sample
from recipes.common.errors import UserError, may_pass
from recipes.common.options import Options
from recipes.common.seeding import hash_seed
from recipes.common.task import SKIPPED

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
"""Those of torchvision's ImageFolder; other files are left out."""

MEAN = torch.tensor([0.485, 0.456, 0.406]) * 255
STD = torch.tensor([0.229, 0.224, 0.225]) * 255
"""ImageNet's mean and standard deviation per channel, in units of the raw pixels."""

MAX_ASPECT_RATIO = 32
"""If an image's longer side exceeds this many times the shorter one, evaluation scales only the middle."""

MOST_REDUCTION = 64
"""A GPU scales an image down by up to 94: its kernel keeps a window's pixels and weights in 48 kB."""

SCALE, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""For random-resized crops: share of the image's area, width over height, attempts before the centre is taken."""


class Images(Dataset[Sample], ABC):
    """Images decoded by (epoch, index); one that cannot be read or decoded comes back blank, with its fault."""

    labels: Tensor
    """int64, shape (N,)."""
    encodes_later = False
    """Whether samples are Encoded, for a BatchDecoder (gpu_decode.py)."""

    def __init__(self, image_size: int, seed: int, train: bool) -> None:
        self.image_size, self.seed, self.train = image_size, seed, train
        self.eval_resize: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def path(self, index: int) -> str:
        """Return where an image is, for messages."""

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return an image's file; raises OSError if it cannot be read as it was stored."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that identifies the images (count and digest)."""

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        try:
            return Sample(self._load(self.read(index), epoch, index), self.labels[index])
        except BAD_IMAGE as error:
            blank = torch.zeros(self.image_size, self.image_size, 3, dtype=torch.uint8)
            substitute = encode_pixels(blank, index) if self.encodes_later else blank
            path = self.path(index)
            if isinstance(error, OSError) and error.errno is not None:  # Pillow's own errors have no errno
                fix = "fix this, then add --resume auto"
                fault = f"cannot read {path}: {error.strerror}; {fix}"
                return Sample(substitute, torch.tensor(SKIPPED), fault, is_passing=may_pass(error))
            return Sample(substitute, torch.tensor(SKIPPED), f"{path} does not decode ({error})", is_damaged=True)

    def _load(self, content: bytes, epoch: int, index: int) -> Tensor | Encoded:
        """Return an image from its file: cropped at random for training, the centre for evaluation."""
        seed = hash_seed(self.seed, epoch, index)

        def choose(width: int, height: int) -> CropBox:
            return random_box(width, height, random.Random(seed)) if self.train else whole_box(width, height)

        is_flipped = self.train and bool(hash_seed(seed) & 1)  # a bit of its own: a box takes any number of draws
        if self.encodes_later and (found := find_part(content, choose)):
            return encode(content, index, is_flipped, found[1])
        pixels = self.fit(decode(content, choose), is_flipped)
        return encode_pixels(pixels, index) if self.encodes_later else pixels

    def fit(self, pixels: Tensor, is_flipped: bool) -> Tensor:
        """Return an image's chosen part, uint8 (H, W, 3), in the batch's size; for evaluation, its centre."""
        if not self.train:
            return centre_crop(pixels, self.image_size, self.eval_resize)
        image = resize(pixels, self.image_size, self.image_size)
        return image.flip(1) if is_flipped else image


class ImageFolder(Images):
    """An image per file; the samples' paths are relative to `folder`."""

    def __init__(
        self, samples: list[tuple[str, int]], image_size: int, seed: int, train: bool, folder: str | Path = ""
    ) -> None:
        super().__init__(image_size, seed, train)
        self.folder = folder
        # Tensors are in memory that all workers of a rank share; each would have its own list of a million paths.
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
        """Return a string that identifies the images (count and digest)."""
        return f"{len(self)} images with digest {digest(self.paths, self.labels):08x} of names and classes"


def random_box(width: int, height: int, chance: random.Random) -> CropBox:
    """Draw the box of a random-resized crop, from the same distribution as torchvision's RandomResizedCrop.

    Source: Szegedy et al. 2014, Going deeper with convolutions, https://arxiv.org/abs/1409.4842.
    """
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(TRIES):
        area = width * height * chance.uniform(*SCALE)
        ratio = math.exp(chance.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return CropBox(chance.randint(0, width - w), chance.randint(0, height - h), w, h)
    # The image is long and narrow: take its centre, with the nearest ratio.
    ratio = min(max(width / height, RATIO[0]), RATIO[1])
    w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
    return CropBox((width - w) // 2, (height - h) // 2, w, h)


def whole_box(width: int, height: int) -> CropBox:
    """Return the box of the whole image."""
    return CropBox(0, 0, width, height)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Scale uint8 pixels (H, W, 3) to (height, width, 3) as Pillow does: bilinear, antialiased if it shrinks.

    The result is on the CPU if a GPU cannot do it.
    """
    if pixels.is_cuda and max(pixels.shape[0] / height, pixels.shape[1] / width) > MOST_REDUCTION:
        pixels = pixels.cpu()
    planes = pixels.unsqueeze(0).permute(0, 3, 1, 2)  # a view, channels last: that kernel is the fast one
    values = planes.float() if pixels.is_cuda else planes  # GPUs do not scale integers
    scaled = interpolate(values, (height, width), mode="bilinear", antialias=True)
    if pixels.is_cuda:
        scaled = scaled.round_().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1)[0]


def centre_crop(pixels: Tensor, size: int, short: int | None = None) -> Tensor:
    """Return ImageNet's usual view for evaluation: scale the shorter side to `short`, crop the centre.

    `short` is by default 256/224 of `size`.
    """
    height, width = pixels.shape[:2]
    if (longest := MAX_ASPECT_RATIO * min(height, width)) < max(height, width):
        # Of 1 x 4000 pixels, the scaled image would take 800 MB, and the crop needs one of these pixels.
        top, left = (height - min(height, longest)) // 2, (width - min(width, longest)) // 2
        pixels = pixels[top : top + longest, left : left + longest]
        height, width = pixels.shape[:2]
    short = short or round(size * 256 / 224)
    # The longer side is rounded down, as torchvision's Resize does it.
    rows = short if height <= width else int(short * height / width)
    columns = short if width <= height else int(short * width / height)
    top, left = round((rows - size) / 2), round((columns - size) / 2)
    return resize(pixels, rows, columns)[top : top + size, left : left + size]


@dataclass(frozen=True)
class Listing:
    """The images below a folder. Every rank needs the same ones in the same order, so one rank walks for all."""

    train: list[tuple[str, int]]
    """Path below the folder, with slashes, and label of each image."""
    test: list[tuple[str, int]]
    classes: list[str]
    """Names, in the order of their numbers."""
    state: str
    """Digest of the inodes and times of the class folders: a rank that sees the same ones need not walk again."""

    def to_bytes(self) -> bytes:
        """Return the listing as ranks exchange it, about 50 bytes per image."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Listing:
        """Return the listing that `to_bytes` was called on, with its tuples as lists."""
        return cls(**json.loads(content))


def find_images(folder: Path) -> Listing:
    """Find all images below a folder.

    Raises UserError if a folder cannot be read or has no classes or images, val has a class that train has not, or
    train has one folder, of folders alone, which may be the classes.
    """
    state = _folder_digest(folder)
    train, test = _scan(folder, "train"), _scan(folder, "val")
    if unknown := sorted(test.keys() - train.keys()):
        raise UserError(f"{folder / 'val'} has the class {unknown[0]!r}, which train does not have; remove it")
    name, *others = train
    if not others and all(path.count(os.sep) > 2 for path in train[name]):
        raise UserError(f"{folder / 'train'} has the one class {name!r}; are the classes in it? Then move them up")
    labels = {name: label for label, name in enumerate(train)}

    def numbered(classes: dict[str, list[str]]) -> list[tuple[str, int]]:
        return [(path, labels[name]) for name, paths in classes.items() for path in paths]

    return Listing(numbered(train), numbered(test), [*train], state)


def check_listing(listing: Listing, folder: Path) -> None:
    """Compare this rank's folder with the one that rank 0 has walked.

    Raises UserError with the first image that one of the two lacks.
    """
    if _folder_digest(folder) == listing.state:
        return
    own = find_images(folder)
    for ours, theirs in ((own.train, listing.train), (own.test, listing.test)):
        here, there = dict(ours), dict(theirs)
        if path := min(here.keys() ^ there.keys(), default=""):
            lack = f"has {path}, which rank 0 lacks" if path in here else f"lacks {path}, which rank 0 has"
            place = f"--data-dir {folder} on {socket.gethostname()}"
            raise UserError(f"{place} {lack}; give all nodes the same images")


def load_imagefolder(
    args: Options, device: torch.device, on_bad_image: Callable[[UserError], None], found: bytes
) -> Data:
    """Return the images below --data-dir; `found` is rank 0's Listing, empty unless it has walked for all ranks.

    Raises UserError as find_images() and check_listing().
    """
    listing = Listing.from_bytes(found) if found else find_images(args.data_dir)
    if found:
        check_listing(listing, args.data_dir)
    splits = [
        ImageFolder(samples, args.image_size, args.seed, is_train, args.data_dir)
        for samples, is_train in ((listing.train, True), (listing.test, False))
    ]
    data = data_of(splits, len(listing.classes), args, device, on_bad_image)
    return replace(data, classes=listing.classes)


def data_of(
    splits: Sequence[Images],
    num_classes: int,
    args: Options,
    device: torch.device,
    on_bad_image: Callable[[UserError], None],
) -> Data:
    """Return training and test images as data whose splits --workers processes decode."""
    if not import_nvimgcodec() and os.environ.get("RANK", "0") == "0":
        print("note: no nvImageCodec here: Pillow decodes whole images, which takes longer", file=sys.stderr)
    normalise = Normalise(MEAN, STD, args.image_size, device, args.channels_last)
    if args.decode == "gpu" and device.type != "cuda":
        raise UserError("--decode gpu: this run is on a CPU; drop it")
    decode_parts = PartDecoder(device, max(1, args.workers)) if args.decode == "gpu" else None

    def load_split(images: Images) -> LoadedSplit:
        if not decode_parts:
            return LoadedSplit(images, args, device, on_bad_image, normalise)
        images.encodes_later = True
        decode = BatchDecoder(images.image_size, images.fit, images.path, decode_parts)
        return LoadedSplit(images, args, device, on_bad_image, normalise, collate, decode)

    for images in splits:
        images.eval_resize = args.eval_resize
    train, test = map(load_split, splits)
    return replace(Data.of_images(train, test, 3, args.image_size, num_classes), may_skip=args.skip_bad_images)


def _folder_digest(folder: Path) -> str:
    """Return a digest that is the same wherever the folder is mounted, until an image is added or removed."""
    state = hashlib.sha256()
    for name in ("train", "val"):
        with contextlib.suppress(OSError):  # find_images() says what is missing
            entries = [(entry.name, entry.stat()) for entry in os.scandir(folder / name) if entry.is_dir()]
            for entry, stat in sorted(entries, key=lambda item: item[0]):
                state.update(os.fsencode(f"{name}/{entry} {stat.st_ino} {stat.st_mtime_ns}\n"))
    return state.hexdigest()


def is_left_out(name: str) -> bool:
    """Return whether a file or folder is hidden, or has Synology's thumbnails."""
    return name[0] == "." or name == "@eaDir"


def check_links(folder: str | Path) -> None:
    """Raise OSError if a link in a folder leads to nothing; an image that is one is reported when it is read."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() and not is_left_out(entry.name) and not entry.name.lower().endswith(EXTENSIONS):
                entry.stat()


def is_link_cycle(path: Path) -> bool:
    """Return whether a link leads to a folder that contains it: a walk through it would not end."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    return any(parent.resolve().is_relative_to(target) for parent in path.absolute().parents)


def _scan(folder: Path, split: str) -> dict[str, list[str]]:
    """Return the classes of split/CLASS and the paths of their images below the folder, both sorted.

    Hidden files and folders are left out, such as .ipynb_checkpoints, macOS's ._photo.jpg and .Trash, and so are
    Synology's thumbnails and links that lead back. A link to nothing may be a class or a folder, and is refused.
    """
    root, layout = folder / split, "imagefolder expects DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg"

    def refuse(error: OSError) -> NoReturn:  # os.walk() would pass over it as if it were empty
        fix = layout if error.filename == str(root) else "make it readable for this user, or remove it"
        if (path := Path(error.filename)).is_symlink():
            fix = f"it is a link to {path.readlink()}: restore that, or remove the link"
        what = f"--data-dir: cannot read {error.filename} ({error.strerror}); {fix}"
        raise UserError(what, is_passing=may_pass(error))

    try:
        check_links(root)
        entries = [entry for entry in os.scandir(root) if entry.is_dir() and not is_left_out(entry.name)]
        names = sorted(entry.name for entry in entries if not is_link_cycle(Path(entry.path)))
    except OSError as error:
        refuse(error)
    if not names:
        raise UserError(f"--data-dir: {root} has no class folders; {layout}")
    classes: dict[str, list[str]] = {name: [] for name in names}
    for name, paths in classes.items():
        for place, folders, files in os.walk(root / name, onerror=refuse, followlinks=True):
            folders[:] = [f for f in folders if not is_left_out(f) and not is_link_cycle(Path(place, f))]
            images = [file for file in files if file.lower().endswith(EXTENSIONS) and not is_left_out(file)]
            if len(images) < len(files):
                try:
                    check_links(place)
                except OSError as error:
                    refuse(error)
            paths += [os.path.relpath(os.path.join(place, file), folder) for file in images]
        if not paths:
            raise UserError(f"--data-dir: {root / name} has no images ({', '.join(EXTENSIONS)}); remove it")
        paths.sort()
    return classes
