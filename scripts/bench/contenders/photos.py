"""Read folders of JPEGs in one process and thread: the recipes' input, torchvision's, or the decoder alone.

    python -m scripts.bench.contenders.photos batches|torchvision|huffman FOLDER

Prints the images per second of CPU time, summed over the process's threads: the throughput of one core.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

SIZE, BATCH_SIZE = 224, 32
SECONDS = 4.0


def batches(folder: Path) -> Iterator[int]:
    """Yield the sizes of the batches that a recipe trains on: cropped, flipped and normalised."""
    from recipes.common.data import load_data
    from recipes.single.train import options

    words = ["--data", "imagefolder", "--data-dir", str(folder), "--workers", "0", "--image-size", str(SIZE)]
    split = load_data(options(words), torch.device("cpu"), on_bad_image=print).train
    for epoch in itertools.count():
        for images, _ in split.batches(torch.arange(len(split)).split(BATCH_SIZE), epoch):
            yield len(images)


def torchvision(folder: Path) -> Iterator[int]:
    """Yield the sizes of batches made as in torchvision's reference training for ImageNet."""
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


def huffman(folder: Path) -> Iterator[int]:
    """Decode images from memory with libjpeg-turbo and do nothing else; yield 1 for each image.

    The output is the smallest that the decoder offers, an eighth of each side: the whole image is still
    Huffman-decoded, but the IDCT of a block yields a single number.
    """
    import simplejpeg

    contents = [path.read_bytes() for path in sorted((folder / "train").rglob("*.jpg"))]
    while True:
        for content in contents:
            simplejpeg.decode_jpeg(content, min_height=1, min_width=1, min_factor=8)
            yield 1


CONTENDERS = {reader.__name__: reader for reader in (batches, torchvision, huffman)}


def main() -> None:
    """Read for SECONDS of CPU time and print the speed."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # measure the CPU even if there is a GPU
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
