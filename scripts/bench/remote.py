"""Shards on a web server 50 ms away and on a local disk, beside the image folder; and how long opening many takes.

The server is a thread of this process that waits 50 ms before each answer. One worker process reads and decodes.
All of them read from memory: the files have just been written.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from recipes.common.data.shards import FIELDS, INDEX, SPLITS, pack, write_index
from scripts.bench.figures import Figure, Rounds, median_and_range, speed_figure, take_turns
from scripts.bench.jpeg import write_photos
from scripts.bench.programs import contender
from scripts.bench.range_server import serve

DELAY_S = 0.05
PHOTOS, COPIES = 256, 8
BLOCKS = ("--shuffle-block", "8")
MANY, MANY_VAL, SHARDS, SHARD_BYTES, IMAGE_BYTES = 1_281_167, 50_000, 141, 10**9, 100_000
"""ImageNet-1k's images, in shards as `make shards` writes them."""


def write_shards(folder: Path) -> Path:
    """Pack photographs, each several times; return the shards' folder."""
    write_photos(folder / "photos", PHOTOS)
    for path in sorted((folder / "photos" / "train").rglob("*.jpg")):
        for copy in range(1, COPIES):
            os.link(path, path.with_name(f"{path.stem}-{copy}.jpg"))
    list(pack(folder / "photos", folder / "shards", 10**8))
    return folder / "shards"


def write_many(folder: Path) -> Path:
    """Write the index of as many images as ImageNet has, and shards that are holes; return their folder."""
    folder.mkdir()
    rows = np.arange(MANY)
    each = -(-MANY // SHARDS)
    values = {"shard": rows // each, "offset": rows % each * IMAGE_BYTES, "size": rows * 0 + IMAGE_BYTES - 1024}
    values |= {"crc": rows, "label": rows % 1000}
    arrays: dict[str, Any] = {}
    for split, count in zip(SPLITS, (MANY, MANY_VAL), strict=True):
        arrays |= {f"{split}_{name}": values[name][:count].astype(kind) for name, kind in FIELDS.items()}
    shards = {f"train-{number:06d}.tar": SHARD_BYTES for number in range(SHARDS)}
    for name in shards:
        (folder / name).touch()
        os.truncate(folder / name, SHARD_BYTES)
    write_index(folder, {"num_classes": 1000, "shards": shards}, arrays)
    assert (folder / INDEX).stat().st_size > 28 * MANY
    return folder


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure each contender in a process of its own."""
    shards, many = write_shards(folder), write_many(folder / "many")
    with serve(shards, DELAY_S) as (url, server), serve(many, DELAY_S) as (many_url, _):
        caches: list[Path] = []

        def speed(place: Any, *words: str, how: str = "read") -> float:
            words = (how, "--data-dir", str(place), "--workers", "1", *words)
            return contender("shards", words)["images_per_s"]

        def cold(*words: str, how: str = "read") -> float:
            caches.append(folder / f"cache-{len(caches)}")
            found = speed(url, "--cache-dir", str(caches[-1]), *words, how=how)
            os.sync()  # the kernel would write while the next contender reads
            return found

        contenders = {
            "folder": lambda: speed(folder / "photos", "--data", "imagefolder"),
            "disk": lambda: speed(shards),
            "new cache": cold,
            "full cache": lambda: speed(url, "--cache-dir", str(caches[0])),
            f"new cache, {' '.join(BLOCKS)}": lambda: cold(*BLOCKS),
            "bare new cache": lambda: cold(how="bare"),
            f"bare new cache, {' '.join(BLOCKS)}": lambda: cold(*BLOCKS, how="bare"),
            "no cache": lambda: speed(url),
            f"no cache, {' '.join(BLOCKS)}": lambda: speed(url, *BLOCKS),
            "bare no cache": lambda: speed(url, how="bare"),
            f"bare no cache, {' '.join(BLOCKS)}": lambda: speed(url, *BLOCKS, how="bare"),
        }
        values = take_turns(contenders, rounds)
        in_flight = []
        for words in ((), BLOCKS):
            server.requests, server.most, server.busy_s = 0, 0, 0.0
            spent = PHOTOS * COPIES / speed(url, *words)
            note = f"{server.most} at most; {server.requests} requests"
            name = " ".join(("reads in flight without a cache, on average", *words))
            in_flight.append(Figure(name, server.busy_s / spent, note=note, no_limit="a count"))
        opened = [contender("shards", ["open", "--data-dir", many_url], 2)["open_s"] for _ in range(rounds)]
    name = f"opening {MANY:,} images 50 ms away: seconds of the slower of 2 ranks"
    opening = Figure(name, *median_and_range(opened), "<= 5", no_limit="a bound on a wait")
    return [*speed_figures(values), *in_flight, opening]


def speed_figures(values: Rounds) -> list[Figure]:
    """Return the ratios of speed: of shards on a disk, and of each way to read them from the server."""
    what, local = "images/s, server 50 ms away", "the same shards on a disk"
    packed = "the image folder that was packed"
    on_disk = speed_figure("images/s, shards on a disk", values, "disk", "folder", ">= 1", packed, "images/s")
    figures = [replace(on_disk, no_limit="both decode the same images")]
    for name in [name for name in values if "cache" in name and "bare" not in name]:
        # The server and its client take time of the same cores: where all is requested, that much is the limit.
        bare, goal = f"bare {name}", ">= 0.95"
        has_bare = bare in values
        named = partial(speed_figure, f"{what}, {name}", values, name, unit="images/s")
        figures.append(named("disk", "" if has_bare else goal, local, is_limit=not has_bare))
        if has_bare:
            does = "sends, receives and writes" if "new" in name else "sends and receives"
            figures.append(named(bare, goal, f"a client that {does} bytes, and no more", is_limit=True))
    return figures
