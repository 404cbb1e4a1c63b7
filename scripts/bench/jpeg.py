"""JPEG input on one core: the recipes' crops beside torchvision's, and beside Huffman decoding alone.

The limit is Huffman decoding: no part of it can be skipped. A decode to an eighth of the size does little else.

The images are crops of the two photographs in scikit-learn: 500x375 and about 110 KB each, like ImageNet's.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from statistics import mean

from PIL import Image
from sklearn.datasets import load_sample_image

from scripts.bench.contenders.photos import CONTENDERS
from scripts.bench.figures import Figure, speed_figure, take_turns
from scripts.bench.programs import contender

COUNT, WIDTH, HEIGHT = 192, 500, 375
QUALITY = {"china.jpg": 97, "flower.jpg": 98}
"""JPEG quality for each photograph that gives about 110 KB with 4:2:0 chroma, as cameras and the web use."""


def write_photos(folder: Path, images: int) -> float:
    """Write `images` JPEGs to train/ and two to val/, in folders like ImageNet's; return their mean size in KB."""
    photos = {name: Image.fromarray(load_sample_image(name)) for name in QUALITY}
    chance = random.Random(0)
    sizes = []
    for split, count in (("train", images), ("val", 2)):
        for i in range(count):
            name = list(QUALITY)[i % 2]
            photo = photos[name]
            left, top = chance.randint(0, photo.width - WIDTH), chance.randint(0, photo.height - HEIGHT)
            part = photo.crop((left, top, left + WIDTH, top + HEIGHT))
            if chance.random() < 0.5:
                part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            path = folder / split / name.removesuffix(".jpg") / f"{i:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            part.save(path, quality=QUALITY[name], subsampling="4:2:0")
            sizes.append(path.stat().st_size / 1000)
    return mean(sizes)


def speed(name: str, folder: Path) -> float:
    """Return a contender's images per second of CPU time."""
    return contender("photos", [name, str(folder)])["images_per_s"]


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure each contender in its own process."""
    kilobytes = write_photos(folder, COUNT)
    values = take_turns({name: partial(speed, name, folder) for name in CONTENDERS}, rounds)
    name = f"normalised batches of JPEGs of {WIDTH}x{HEIGHT}, {kilobytes:.0f} KB, on one core"
    torchvision, huffman = "torchvision's ImageFolder", "the images' Huffman decoding alone"
    return [
        speed_figure(name, values, "batches", "torchvision", ">= 2", torchvision, "images/s"),
        speed_figure(name, values, "batches", "huffman", "", huffman, "images/s", is_limit=True),
    ]
