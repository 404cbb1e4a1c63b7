"""JPEG input on one core: the recipes' crops beside torchvision's, and beside libjpeg-turbo's bare full decode.

The images are parts of the two photographs that scikit-learn carries: 500x375 and some 110 KB each, as ImageNet's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import mean, median

import numpy as np
from PIL import Image
from torchvision.transforms import v2

from recipes.common.imagefolder import random_box, resize
from recipes.common.images import decode
from scripts.bench.contenders.photos import CONTENDERS, SIZE
from scripts.bench.figures import Figure, Rounds, ratio, take_turns
from scripts.local import ROOT

PART = "jpeg"
COUNT, WIDTH, HEIGHT = 192, 500, 375
QUALITY = {"china.jpg": 97, "flower.jpg": 98}
"""Of each photograph, for about 110 KB with 4:2:0 chroma, as cameras and the web have it."""
TIMEOUT_S = 120.0


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


def speed(contender: str, folder: Path) -> float:
    """Return the images in a second of CPU time."""
    command = [sys.executable, "-m", "scripts.bench.contenders.photos", contender, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])["images_per_s"]


def differences(folder: Path) -> list[float]:
    """Return, by image, the mean difference to torchvision's pixels of the same crop, in levels of 255."""
    found = []
    for i, path in enumerate(sorted((folder / "train").rglob("*.jpg"))):
        box = random_box(WIDTH, HEIGHT, random.Random(i))
        ours = resize(decode(str(path), lambda *_, box=box: box), SIZE, SIZE)
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
    note = f"levels of 255, over {len(per_image)} crops; the same boxes and bilinear filter"
    what = f"of JPEGs of {WIDTH}x{HEIGHT}, {kilobytes:.0f} KB, on one core"
    return [
        figure(
            values, f"normalised batches {what}", "batches", "torchvision", ">= 2", "torchvision's ImageFolder"
        ),
        figure(values, f"crops in uint8 {what}", "crops", "decode", ">= 1.2", "libjpeg-turbo's full decode alone"),
        figure(values, f"normalised batches {what}", "batches", "decode", "", "libjpeg-turbo's full decode alone"),
        Figure(
            PART,
            f"mean pixel difference {what}",
            mean(per_image),
            min(per_image),
            max(per_image),
            peer="torchvision on Pillow",
            note=note,
        ),
    ]


def figure(values: Rounds, name: str, ours: str, against: str, goal: str, peer: str) -> Figure:
    """Return a ratio of speeds."""
    note = f"{median(values[ours]):,.0f} against {median(values[against]):,.0f} images/s"
    return Figure(PART, name, *ratio(values, ours, against), goal, peer, note)
