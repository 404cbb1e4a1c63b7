"""Read folders of JPEGs in one process and thread: the recipes' input, torchvision's, or the decoder alone.

    python -m scripts.bench.contenders.photos batches|crops|torchvision|decode|huffman FOLDER

Prints the images in a second of CPU time, and in how many of all its threads: what one core does.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

SIZE, BATCH_SIZE = 224, 32
SECONDS = 4.0


def batches(folder: Path) -> Iterator[int]:
    """Yield the sizes of the batches that a recipe trains on: cropped, flipped, normalised."""
    split = our_split(folder)
    for epoch in itertools.count():
        indices = torch.arange(len(split)).split(BATCH_SIZE)
        for images, _ in split.batches(indices, epoch):
            yield len(images)


def crops(folder: Path) -> Iterator[int]:
    """Yield the sizes of the batches that a recipe's worker process hands over: cropped, flipped, uint8."""
    from recipes.common.data.imagefolder import _collate

    split = our_split(folder)
    for epoch in itertools.count():
        for indices in torch.arange(len(split)).split(BATCH_SIZE):
            images, _, _ = _collate([split.dataset[epoch, i] for i in indices.tolist()])
            yield len(images)


def our_split(folder: Path) -> Any:
    """Return the training half as a recipe reads it."""
    from recipes.common.data import load_data
    from recipes.single.train import options

    words = ["--data", "imagefolder", "--data-dir", str(folder), "--workers", "0", "--image-size", str(SIZE)]
    return load_data(options(words), torch.device("cpu"), on_bad_image=print).train


def torchvision(folder: Path) -> Iterator[int]:
    """Yield the sizes of batches as torchvision's reference for ImageNet makes them."""
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    dataset = datasets.ImageFolder(str(folder / "train"), transform)
    while True:
        for images, _ in DataLoader(dataset, BATCH_SIZE):
            yield len(images)


def decode(folder: Path, **options: int) -> Iterator[int]:
    """Decode whole images from memory by libjpeg-turbo, and do nothing else."""
    import simplejpeg

    contents = [path.read_bytes() for path in sorted((folder / "train").rglob("*.jpg"))]
    while True:
        for content in contents:
            simplejpeg.decode_jpeg(content, **options)
            yield 1


CONTENDERS: dict[str, Callable[[Path], Iterator[int]]] = {
    "batches": batches,
    "crops": crops,
    "torchvision": torchvision,
    "decode": decode,
    # The smallest size that the decoder gives, an eighth: all is Huffman-decoded, and an IDCT is one number.
    "huffman": partial(decode, min_height=1, min_width=1, min_factor=8),
}


def main() -> None:
    """Read for some seconds and print the speed."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what one core does, also where there is a GPU
    sizes = CONTENDERS[sys.argv[1]](Path(sys.argv[2]))
    warm = 0
    while warm < 2 * BATCH_SIZE:
        warm += next(sizes)
    begin, count = time.process_time(), 0
    while (spent := time.process_time() - begin) < SECONDS:
        count += next(sizes)
    print(json.dumps({"images_per_s": count / spent}))


if __name__ == "__main__":
    main()
