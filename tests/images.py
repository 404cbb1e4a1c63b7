"""A folder of images to train on: ImageNet's layout in small."""

import random
from pathlib import Path

from PIL import Image

CLASSES, TRAIN, VAL = 3, 9, 4


def make_images(folder: Path) -> Path:
    """Write a tree of small JPEG files of various sizes, with noise that differs by class; return its folder."""
    chance = random.Random(0)
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(CLASSES):
            place = folder / split / f"class{number}"
            place.mkdir(parents=True)
            for i in range(count):
                size = chance.randrange(33, 60), chance.randrange(33, 60)
                pixels = bytes(
                    chance.randrange(80 * number, 80 * number + 90) for _ in range(size[0] * size[1] * 3)
                )
                Image.frombytes("RGB", size, pixels).save(place / f"{i}.{'JPEG' if i % 2 else 'jpg'}")
    Image.new("L", (40, 40), 99).save(folder / "train" / "class0" / "grey.png")
    (folder / "train" / "class0" / "README.txt").write_text("not an image")
    return folder
