"""Images packed into tar files, and an index of where each lies: few large files instead of many small ones.

`make shards DATA_DIR=/data/imagenet OUT=/data/imagenet-shards` packs an image folder, in its order: a run on the
shards gives the very numbers of a run on the folder. The layout is WebDataset's (https://github.com/webdataset),
00000007.jpg and 00000007.cls one after the other, so that others can read the shards too.

An image is read where the index says, whichever the order: one read without an open, and its checksum is compared.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.common.data.imagefolder import Images, data_of, walk
from recipes.common.data.images import read
from recipes.common.data.splits import Data
from recipes.common.errors import UserError
from recipes.common.options import Options

INDEX = "index.npz"
"""Written last: a folder without it is not whole."""

FIELDS = {"shard": np.int32, "offset": np.int64, "size": np.int32, "crc": np.uint32, "label": np.int64}
"""Of each image: the number of its shard, where it lies there, its bytes, their CRC-32, and its class."""

HALVES = ("train", "val")


class ShardedImages(Images):
    """Images in shards.

    Args:
        folder: of the shards.
        shards: their names.
        fields: arrays of FIELDS, a number for each image.
        args: as for the other images.
        train: whether crops and flips are drawn.
    """

    def __init__(
        self, folder: Path, shards: list[str], fields: dict[str, np.ndarray], args: Options, train: bool
    ) -> None:
        super().__init__(args.image_size, args.seed, train)
        self.folder, self.shards = folder, shards
        # Tensors lie in memory that all workers of a rank share.
        self.fields = {name: torch.from_numpy(fields[name].astype(np.int64)) for name in FIELDS}
        self.labels = self.fields["label"]
        self.files: dict[tuple[int, int], int] = {}
        """Open files, by process and shard: a fork would share the position, which pread() does not use."""

    def path(self, index: int) -> str:
        """Return the shard of an image and its place there."""
        return f"{self.folder / self._shard(index)}, bytes from {int(self.fields['offset'][index])} on,"

    def _shard(self, index: int) -> str:
        return self.shards[int(self.fields["shard"][index])]

    def read(self, index: int) -> bytes:
        """Return an image's file.

        Raises:
            OSError: the shard cannot be read.
            ValueError: the bytes are not those that were packed.
        """
        shard, offset, size, crc = (int(self.fields[name][index]) for name in ("shard", "offset", "size", "crc"))
        key = os.getpid(), shard
        if key not in self.files:
            self.files[key] = os.open(self.folder / self.shards[shard], os.O_RDONLY | os.O_CLOEXEC)
        content = os.pread(self.files[key], size, offset)
        if zlib.crc32(content) != crc:
            raise ValueError("its checksum is not that of the image that was packed")
        return content

    def fingerprint(self) -> str:
        """Return what identifies the images."""
        digest = 0
        for name in ("crc", "label"):
            digest = zlib.crc32(self.fields[name].numpy().tobytes(), digest)
        return f"{len(self)} images with digest {digest:08x}"


def load_shards(args: Options, device: torch.device, on_bad_image: Callable[[UserError], None]) -> Data:
    """Return the images in the shards of --data-dir.

    Raises:
        UserError: the index is missing or damaged, or a shard is missing or has another size.
    """
    folder, path = args.data_dir, args.data_dir / INDEX
    try:
        with np.load(path, allow_pickle=False) as index:
            about = json.loads(str(index["about"]))
            halves = {half: {name: index[f"{half}_{name}"] for name in FIELDS} for half in HALVES}
    except OSError as error:
        fix = "pack an image folder by `make shards DATA_DIR=... OUT=...`"
        raise UserError(f"--data shards: cannot read {path} ({error.strerror or error}); {fix}") from None
    except (ValueError, KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"--data shards: {path} is damaged ({error}); pack the images again") from None
    for name, size in about["shards"].items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise UserError(
                f"--data shards: cannot read {folder / name} ({error.strerror}); copy it again"
            ) from None
        if found != size:
            raise UserError(f"--data shards: {folder / name} has {found} bytes instead of {size}; copy it again")
    shards = list(about["shards"])
    train, test = (ShardedImages(folder, shards, halves[half], args, half == "train") for half in HALVES)
    return data_of((train, test), about["num_classes"], args, device, on_bad_image)


def pack(source: Path, folder: Path, shard_bytes: int) -> Iterator[tuple[str, int]]:
    """Pack the images below `source`, as imagefolder lists them; yield the name and the images of each shard.

    Raises:
        UserError: no image folder, or shards are there already.
        OSError: an image cannot be read, or the disk is full.
    """
    listing = walk(source)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"OUT {folder} is not empty; remove what it holds, or choose another folder")
    arrays: dict[str, Any] = {}
    shards: dict[str, int] = {}
    for half, samples in zip(HALVES, (listing.train, listing.test), strict=True):
        rows: list[tuple[int, int, int, int, int]] = []
        numbers = itertools.count()
        while len(rows) < len(samples):
            name, first = f"{half}-{next(numbers):06d}.tar", len(rows)
            with open(folder / name, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
                while len(rows) < len(samples) and (tar.offset < shard_bytes or len(rows) == first):
                    path, label = samples[len(rows)]
                    content, key = read(os.path.join(source, path)), f"{len(rows):08d}"
                    offset = add(tar, key + Path(path).suffix.lower(), content)
                    add(tar, f"{key}.cls", str(label).encode())
                    rows.append((len(shards), offset, len(content), zlib.crc32(content), label))
            shards[name] = (folder / name).stat().st_size
            yield name, len(rows) - first
        for number, (name, kind) in enumerate(FIELDS.items()):
            arrays[f"{half}_{name}"] = np.array([row[number] for row in rows], kind)
    about = json.dumps({"num_classes": listing.num_classes, "shards": shards})
    temporary = folder / f".{INDEX}"
    with open(temporary, "wb") as file:
        np.savez(file, about=np.array(about), **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / INDEX)


def add(tar: tarfile.TarFile, name: str, content: bytes) -> int:
    """Add a file to an archive; return where its content begins."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
    blocks = -(-len(content) // tarfile.BLOCKSIZE)
    return int(tar.offset) - blocks * tarfile.BLOCKSIZE
