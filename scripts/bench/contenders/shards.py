"""Read shards from a disk or a server: images in a second, or the seconds until all ranks have opened them.

    python -m scripts.bench.contenders.shards read --data-dir FOLDER-OR-URL
    python -m scripts.bench.contenders.shards bare --data-dir URL
    torchrun --nproc-per-node=2 -m scripts.bench.contenders.shards open --data-dir URL

The last line is a JSON object. Workers decode the images in the order of a run's first epoch. `bare` reads
through the cheapest of clients and caches (bare_store.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from recipes.common.data import load_data
from recipes.common.job import draw_order
from recipes.common.process.ranks import read_ranks
from recipes.common.world.agreement import load_same_data
from recipes.common.world.world import connected_world
from recipes.ddp.train import options
from scripts.bench.contenders.bare_store import BareCache, BareStore

BATCH_SIZE, WARM = 32, 4


def read(words: Sequence[str], is_bare: bool = False) -> dict[str, float]:
    """Read the training split once; return the images per second, without the WARM batches while workers start."""
    args = options(words)
    split: Any = load_data(args, torch.device("cpu"), on_bad_image=print).train
    if is_bare:
        split.dataset.store.__class__ = BareStore
        if split.dataset.cache:
            split.dataset.cache.__class__ = BareCache
    order = draw_order(split, args, 0).split(BATCH_SIZE)
    seen, begin = 0, 0.0
    for number, (_, labels) in enumerate(split.batches(order, 0)):
        if number < WARM:
            begin = time.perf_counter()
        else:
            seen += len(labels)
    return {"images_per_s": seen / (time.perf_counter() - begin)}


def open_(words: Sequence[str]) -> dict[str, float]:
    """Load the data as a recipe does; return the seconds of the slowest rank and the number of images."""
    args = options(words)
    with connected_world(args, read_ranks("ddp")) as world:
        begin = time.perf_counter()
        images = len(load_same_data(args, "ddp", world, on_bad_image=print).train)
        longest = max(world.gather_objects(time.perf_counter() - begin))
    return {"open_s": longest, "images": images}


if __name__ == "__main__":
    torch.set_num_threads(1)
    actions: dict[str, Callable[[Sequence[str]], dict[str, float]]] = {"read": read, "open": open_}
    actions["bare"] = partial(read, is_bare=True)
    found = actions[sys.argv[1]](["--data", "shards", *sys.argv[2:]])
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)
