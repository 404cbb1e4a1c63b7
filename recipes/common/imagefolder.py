"""Images in folders, ImageNet's layout: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg.

Each sample's crop and flip are drawn from a seed of (--seed, epoch, index): the same image comes out
whichever rank or worker process decodes it, and after a resume.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from recipes.common.data import SKIPPED, Batch, Data
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.seeding import mix
from recipes.common.signals import restore_default_handlers

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")

MEAN = torch.tensor([0.485, 0.456, 0.406]) * 255
STD = torch.tensor([0.229, 0.224, 0.225]) * 255
"""ImageNet's mean and standard deviation per channel, in units of the raw pixels."""

MAX_WARNINGS = 10


class Decoded(NamedTuple):
    """One sample as a worker process hands it over."""

    image: Tensor
    """uint8, shape (3, S, S)."""
    label: int
    fault: str
    """Why the image does not decode, with its path; empty when it does."""


class ImageFolder(Dataset[Decoded]):
    """Decode by (epoch, index); an image that does not decode comes back blank, with its fault."""

    def __init__(self, samples: list[tuple[str, int]], image_size: int, seed: int, train: bool) -> None:
        self.samples, self.image_size, self.seed, self.train = samples, image_size, seed, train
        if train:
            self.transform = v2.Compose(
                [v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip()]
            )
        else:
            # ImageNet's customary evaluation: the shorter side to 256/224 of the crop, then its centre.
            resize = round(image_size * 256 / 224)
            self.transform = v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(image_size)])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: tuple[int, int]) -> Decoded:
        epoch, index = key
        path, label = self.samples[index]
        try:
            with Image.open(path) as image:
                rgb = image.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            blank = torch.zeros(3, self.image_size, self.image_size, dtype=torch.uint8)
            return Decoded(blank, SKIPPED, f"{path} does not decode ({error})")
        # torchvision draws from the process's generator: lend it to this sample, then put it back.
        with torch.random.fork_rng(devices=[], enabled=self.train):
            if self.train:
                torch.default_generator.manual_seed(mix(self.seed, epoch, index))
            return Decoded(v2.functional.pil_to_tensor(self.transform(rgb)), label, "")


class ImageFolderSplit:
    """Batches decoded by --workers processes and normalised on the device."""

    def __init__(
        self,
        dataset: ImageFolder,
        args: Options,
        device: torch.device,
        on_bad_image: Callable[[UserError], None],
    ) -> None:
        self.dataset, self.args, self.device, self.on_bad_image = dataset, args, device, on_bad_image
        self.mean, self.std = MEAN.to(device).view(1, 3, 1, 1), STD.to(device).view(1, 3, 1, 1)
        self.memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
        self.skipped = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor that is not empty (the share of a rank too many is)."""
        loader: DataLoader[Decoded] = DataLoader(
            self.dataset,
            batch_sampler=[[(epoch, i) for i in index.tolist()] for index in indices if len(index)],
            num_workers=self.args.workers,
            collate_fn=_collate,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_start_worker,
        )
        for images, labels, faults in loader:
            for fault in faults:
                self._report(fault)
            images = images.to(self.device, non_blocking=True)
            images = ((images.float() - self.mean) / self.std).contiguous(memory_format=self.memory_format)
            yield images, labels.to(self.device, non_blocking=True)

    def _report(self, fault: str) -> None:
        if not self.args.skip_bad_images:
            self.on_bad_image(UserError(f"{fault}; mend or remove it, or add --skip-bad-images"))
            return
        self.skipped += 1
        if self.skipped <= MAX_WARNINGS:
            print(f"warning: skipped {fault}", file=sys.stderr, flush=True)


def _start_worker(worker_id: int) -> None:
    restore_default_handlers()
    torch.set_num_threads(1)


def _collate(samples: list[Decoded]) -> tuple[Tensor, Tensor, list[str]]:
    images = torch.stack([sample.image for sample in samples])
    labels = torch.tensor([sample.label for sample in samples])
    return images, labels, [sample.fault for sample in samples if sample.fault]


def load_imagefolder(args: Options, device: torch.device, on_bad_image: Callable[[UserError], None]) -> Data:
    """Return the images below --data-dir.

    Raises:
        UserError: a missing folder, no class folders, no images, or a class that only val has.
    """
    train, classes = _scan(args.data_dir / "train")
    test, test_classes = _scan(args.data_dir / "val")
    unknown = sorted(set(test_classes) - set(classes))
    if unknown:
        raise UserError(f"{args.data_dir / 'val'} has the class {unknown[0]!r}, which train does not have")
    number = {name: i for i, name in enumerate(classes)}

    def split(samples: list[tuple[str, str]], is_train: bool) -> ImageFolderSplit:
        numbered = [(path, number[name]) for path, name in samples]
        dataset = ImageFolder(numbered, args.image_size, args.seed, is_train)
        return ImageFolderSplit(dataset, args, device, on_bad_image)

    return Data(split(train, True), split(test, False), 3, args.image_size, len(classes))


def _scan(root: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (path, class name) of every image below root/CLASS, sorted, and the sorted class names."""
    layout = "imagefolder wants DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg"
    try:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError as error:
        raise UserError(f"--data-dir: cannot read {root} ({error.strerror}); {layout}") from None
    if not classes:
        raise UserError(f"--data-dir: {root} has no class folders; {layout}")
    samples = []
    for name in classes:
        found = [
            os.path.join(folder, file)
            for folder, _, files in os.walk(root / name)
            for file in files
            if file.lower().endswith(EXTENSIONS)
        ]
        if not found:
            raise UserError(f"--data-dir: {root / name} has no images ({', '.join(EXTENSIONS)})")
        samples += [(path, name) for path in sorted(found)]
    return samples, classes
