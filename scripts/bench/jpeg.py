"""JPEG input on one core: the recipes' crops beside torchvision's, and beside libjpeg-turbo alone.

Huffman decoding cannot be done in part: it is the limit. A decode to an eighth of the size does little else.

The images are parts of the two photographs that scikit-learn carries: 500x375 and some 110 KB each, as ImageNet's.
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
from PIL import Image
from torchvision.transforms import v2

from recipes.common.data.imagefolder import random_box, resize
from recipes.common.data.images import decode, read
from scripts.bench.contenders.photos import CONTENDERS, SIZE
from scripts.bench.figures import NO_SPEED, Figure, speed_figure, take_turns
from scripts.bench.programs import contender

PART = "jpeg"
COUNT, WIDTH, HEIGHT = 192, 500, 375
QUALITY = {"china.jpg": 97, "flower.jpg": 98}
"""Of each photograph, for about 110 KB with 4:2:0 chroma, as cameras and the web have it."""


def write_photos(folder: Path, images: int) -> float:
    """Write so many images, as ImageNet's folders have them; return their mean size in KB."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("scikit-learn is missing: its photographs are what is read")
    source = Path(spec.submodule_search_locations[0]) / "datasets" / "images"
    photos = {name: Image.open(source / name).convert("RGB") for name in QUALITY}
    chance = random.Random(0)
    sizes = []
    for half, count in (("train", images), ("val", 2)):
        for i in range(count):
            name = list(QUALITY)[i % 2]
            photo = photos[name]
            left, top = chance.randint(0, photo.width - WIDTH), chance.randint(0, photo.height - HEIGHT)
            part = photo.crop((left, top, left + WIDTH, top + HEIGHT))
            if chance.random() < 0.5:
                part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            path = folder / half / name.removesuffix(".jpg") / f"{i:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            part.save(path, quality=QUALITY[name], subsampling="4:2:0")
            sizes.append(path.stat().st_size / 1000)
    return mean(sizes)


def speed(name: str, folder: Path) -> float:
    """Return the images in a second of CPU time."""
    return contender("photos", [name, str(folder)])["images_per_s"]


def differences(folder: Path) -> list[float]:
    """Return, by image, the mean difference to torchvision's pixels of the same crop, in levels of 255."""
    found = []
    for i, path in enumerate(sorted((folder / "train").rglob("*.jpg"))):
        box = random_box(WIDTH, HEIGHT, random.Random(i))
        ours = resize(decode(read(str(path)), lambda *_, box=box: box), SIZE, SIZE)
        with Image.open(path) as image:
            left, top, width, height = box
            theirs = v2.functional.resized_crop(
                image.convert("RGB"), top, left, height, width, [SIZE, SIZE], antialias=True
            )
        found.append(float(np.abs(ours.numpy().astype(int) - np.array(theirs)).mean()))
    return found


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure each contender in a process of its own."""
    kilobytes = write_photos(folder, COUNT)
    values = take_turns({name: partial(speed, name, folder) for name in CONTENDERS}, rounds)
    per_image = differences(folder)
    what = f"of JPEGs of {WIDTH}x{HEIGHT}, {kilobytes:.0f} KB, on one core"
    peers = {
        "torchvision": "torchvision's ImageFolder",
        "decode": "libjpeg-turbo's full decode alone",
        "huffman": "the images' Huffman decoding alone",
    }
    pixels = Figure(PART, f"mean pixel difference {what}", mean(per_image), min(per_image), max(per_image))
    note = f"levels of 255, over {len(per_image)} crops; the same boxes and bilinear filter"
    return [
        speed_figure(
            PART,
            f"{name} {what}",
            values,
            ours,
            against,
            ">= 2" if (ours, against) == ("batches", "torchvision") else "",
            peer,
            "images/s",
            is_limit=against == "huffman",
        )
        for ours, name in (("batches", "normalised batches"), ("crops", "crops in uint8"))
        for against, peer in peers.items()
    ] + [replace(pixels, peer="torchvision on Pillow", note=note, no_limit=NO_SPEED)]
