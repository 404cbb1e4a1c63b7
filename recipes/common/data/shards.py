"""Images packed into tar files, and an index of where each lies: few large files instead of many small ones.

`make shards DATA_DIR=/data/imagenet OUT=/data/imagenet-shards` packs an image folder. The index has the folder's
order: a run on the shards gives the same numbers as a run on the folder. The layout is WebDataset's
(https://github.com/webdataset), 00000007.jpg followed by 00000007.cls, so that other tools can read the shards,
too. Those of train are in random order, so that a block of neighbours (--shuffle-block) has many classes.

Images are read in any order, at the places that the index gives: one read from an open file, whose checksum is
compared. From a server (stores.py), threads read ahead what the next batches need, neighbours with one request,
and a cache (cache.py) may keep it.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isal import isal_zlib

from recipes.common.arguments import url_of
from recipes.common.data.cache import Cache, open_cache
from recipes.common.data.file_pool import FilePool
from recipes.common.data.imagefolder import Images, data_of, find_images
from recipes.common.data.images import read
from recipes.common.data.splits import Data, digest
from recipes.common.data.stores import PART_BYTES, Store, begin_read, open_store, printable
from recipes.common.data.workers import Keys, Sample
from recipes.common.errors import RefusedError, UserError, as_user_error, may_pass
from recipes.common.folders import check_file, sync_folder
from recipes.common.options import Options
from recipes.common.seeding import permutation

INDEX = "index.npz"
"""Written last: a folder without it is incomplete."""

FIELDS = {"shard": np.int32, "offset": np.int64, "size": np.int32, "crc": np.uint32, "label": np.int64}
"""For each image: the number of its shard, its offset there, its size in bytes, their CRC-32, and its class."""

SPLITS = ("train", "val")

STORAGE_SEED = 2**63 - 1
"""Seeds the order of training images in shards; as a run's --seed, it would give epoch 0 the same order."""

MAX_GAP = 2048
"""Neighbours have fewer bytes than this between them: padding, the first one's class, the second one's header."""

Content = bytes | memoryview

MAX_INDEX_BYTES, MAX_IMAGE_BYTES = 2**33, 2**28
"""A server may send no more for the index (28 bytes per image, so 300 million) and for an image."""


class ShardedImages(Images):
    """Images in shards: below a folder or URL, the shards of these names; `fields` are arrays of FIELDS."""

    def __init__(
        self, folder: str, shards: list[str], fields: dict[str, np.ndarray], args: Options, train: bool
    ) -> None:
        super().__init__(args.image_size, args.seed, train)
        self.folder, self.shards, self.has_blocks = folder, shards, train and args.shuffle_block > 1
        # Tensors are in memory that all workers of a rank share, 32 bytes an image. Torch passes no uint32 on.
        fields = {**fields, "crc": fields["crc"].astype(np.int64)}
        self.fields = {name: torch.from_numpy(fields[name]) for name in FIELDS}
        self.labels = self.fields["label"]
        self.files = FilePool(len(shards))

    def path(self, index: int) -> str:
        """Return an image's shard and its offset there, for messages."""
        return f"{self.folder}/{self._shard(index)} at byte {self._value('offset', index)}"

    def _value(self, name: str, index: int) -> int:
        return self.fields[name].numpy().item(index)  # a third of the time of int(tensor[index])

    def _shard(self, index: int) -> str:
        return self.shards[self._value("shard", index)]

    def is_packed(self, index: int, content: Content) -> bool:
        """Return whether `content` is the image as it was packed."""
        return len(content) == self._value("size", index) and isal_zlib.crc32(content) == self._value("crc", index)

    def read(self, index: int) -> bytes:
        """Return an image's file; raises OSError if the shard cannot be read, or has other bytes."""
        path = f"{self.folder}/{self._shard(index)}"
        content = self.files.read(path, self._value("offset", index), self._value("size", index))
        if not self.is_packed(index, content):
            what = "its checksum is not that of the image that was packed: copy the shard again"
            raise RefusedError(errno.EIO, what)
        return content

    def storage_order(self) -> torch.Tensor:
        """Return the images' indices in the order of the shards: int64, shape (N,)."""
        return torch.from_numpy(np.lexsort((self.fields["offset"].numpy(), self.fields["shard"].numpy())))

    def fingerprint(self) -> str:
        """Return a string that identifies the images (count and digest); of blocks, their places too."""
        places = [self.storage_order()] if self.has_blocks else []
        return f"{len(self)} images with digest {digest(self.fields['crc'], self.labels, *places):08x}"


class RemoteImages(ShardedImages):
    """Images in shards on a server, which threads read ahead."""

    ahead = 128
    """Read at least this many images of the next batches ahead."""

    def __init__(self, store: Store, cache: Cache | None, *others: Any) -> None:
        super().__init__(store.url, *others)
        self.store, self.cache = store, cache
        self.pending: dict[int, tuple[Future[Content], int]] = {}
        """For each image, the read that contains it and the image's offset in that read's result."""

    def __getitems__(self, keys: Keys) -> list[Sample]:
        """Return a batch, and begin to read the next ones; from the first unreadable image on, all are blank.

        Such an image ends the run anyway, and waiting for each of the others could take longer than ranks wait.
        """
        wanted = [index for _, index in itertools.chain(keys, keys.ahead)]
        begun = self._begin([index for index in wanted if index not in self.pending])
        self.pending = {index: begun.get(index) or self.pending[index] for index in wanted}
        samples: list[Sample] = []
        for key in keys:
            samples.append(self[key])
            if samples[-1].fault and not samples[-1].is_damaged:
                break
        return samples + [samples[-1]._replace(fault="")] * (len(keys) - len(samples))

    def _begin(self, indices: list[int]) -> dict[int, tuple[Future[Content], int]]:
        """Begin to read images; one read gets consecutive `indices` that are also neighbours in a shard."""
        found: dict[int, tuple[Future[Content], int]] = {}
        for index in indices if self.cache else ():
            if future := self._look(index):
                found[index] = future, 0
        for group in self._groups(index for index in indices if index not in found):
            first, end = self._value("offset", group[0]), self._end(group[-1])
            check = [partial(self.is_packed, group[0])] if len(group) == 1 else []
            read = partial((self.cache or self.store).read, self._shard(group[0]), first, end, *check)
            future = begin_read(read)
            found |= {index: (future, self._value("offset", index) - first) for index in group}
        return found

    def _look(self, index: int) -> Future[Content] | None:
        """Return an image from the cache, or the error if it cannot be used; None if the image is not in it."""
        assert self.cache
        future: Future[Content] = Future()
        try:
            content = self.cache.look(self._shard(index), self._value("offset", index), self._end(index))
        except OSError as error:
            future.set_exception(error)
            return future
        if not self.is_packed(index, content):
            return None
        future.set_result(content)  # as quick as any disk: a thread would take longer
        return future

    def _groups(self, indices: Iterable[int]) -> Iterator[list[int]]:
        """Yield the images in groups of neighbours, each up to PART_BYTES long."""
        group: list[int] = []
        for index in indices:
            if group and not (
                self._value("shard", index) == self._value("shard", group[-1])
                and 0 <= self._value("offset", index) - self._end(group[-1]) < MAX_GAP
                and self._end(index) - self._value("offset", group[0]) <= PART_BYTES
            ):
                yield group
                group = []
            group.append(index)
        if group:
            yield group

    def _end(self, index: int) -> int:
        return self._value("offset", index) + self._value("size", index)

    def read(self, index: int) -> bytes:
        """Return an image's file, once; raises OSError if the server does not return it as it was packed."""
        future, at = self.pending.pop(index)
        group: Content = self.store.result(future)
        content = bytes(group[at : at + self._value("size", index)])
        if len(content) < len(group) and not self.is_packed(index, content):
            future, _ = self._begin([index])[index]  # alone, so that it is asked for until it is right
            content = bytes(self.store.result(future))
        return content


def read_index(args: Options) -> bytes:
    """Return the index in --data-dir; on a server, also compare the shards' sizes (on rank 0, for all ranks).

    Raises UserError if the index or a shard is missing, or a shard has another size.
    """
    url = url_of(args.data_dir)
    place = f"{url or args.data_dir}/{INDEX}"
    try:
        if not url:
            check_file(args.data_dir / INDEX)
            return (args.data_dir / INDEX).read_bytes()
        store = open_store(url, args.timeout_s)
        [size] = store.results([partial(store.size, INDEX)])
        if not 0 < size <= MAX_INDEX_BYTES:
            raise UserError(f"--data shards: {place} has {size} bytes; pack the images again")
        starts = range(0, size, PART_BYTES)
        parts = [partial(store.read, INDEX, start, min(start + PART_BYTES, size)) for start in starts]
        content = b"".join(store.results(parts))
    except OSError as error:
        packs = "pack an image folder by `make shards DATA_DIR=... OUT=...`"
        fix = "see that the server is up and has it" if url else packs
        what = f"--data shards: cannot read {place} ({error.strerror or error}); {fix}"
        raise UserError(what, is_passing=may_pass(error)) from None
    shards = parse_index(content, place)[0]["shards"]
    check_sizes(url, shards, store.results([partial(store.size, name) for name in shards]))
    return content


def check_sizes(folder: str, shards: dict[str, int], found: Iterator[int]) -> None:
    """Compare the sizes of all shards, in their order, with those of the index; raises UserError."""
    for name, size in shards.items():
        try:
            found_size = next(found)
        except OSError as error:
            fix = "copy it again, or see that the server is up"
            what = f"--data shards: cannot read {folder}/{name} ({error.strerror}); {fix}"
            raise UserError(what, is_passing=may_pass(error)) from None
        if found_size != size:
            what = f"{folder}/{name} has {found_size} bytes instead of {size}"
            raise UserError(f"--data shards: {what}; copy it again")


def parse_index(content: bytes, place: str) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """Return the index's facts about all images and, by split, the arrays of FIELDS.

    Raises UserError if it is not an index, or an image is outside of its shard, or a shard outside of the folder.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_INDEX_BYTES:
                raise ValueError("it unpacks to more than an index")
        with np.load(io.BytesIO(content), allow_pickle=False) as index:
            about = json.loads(str(index["about"]))
            splits = {split: {name: index[f"{split}_{name}"] for name in FIELDS} for split in SPLITS}
        sizes, num_classes = np.array([*about["shards"].values()]), about["num_classes"]
        if sizes.dtype != np.int64 or type(num_classes) is not int:
            raise ValueError("a size or num_classes is not a whole number")
        if strange := [name for name in about["shards"] if not re.fullmatch(r"\w[\w.-]*", name)]:
            raise ValueError(f"{strange[0]!r} is not a shard's name")
        for split, fields in splits.items():
            arrays = [fields[name] for name in FIELDS]
            if [array.dtype for array in arrays] != [*FIELDS.values()]:
                raise ValueError(f"{split} has other fields than images have")
            if not len(arrays[0]) or {array.shape for array in arrays} != {(len(arrays[0]),)}:
                raise ValueError(f"{split} has no images, or not all of them have all fields")
            shard, offset, size, _, label = (array.astype(np.int64) for array in arrays)
            sound = [shard >= 0, shard < len(sizes), offset >= 0, size >= 0, size <= MAX_IMAGE_BYTES]
            sound += [label >= 0, label < num_classes]
            if not all(values.all() for values in sound) or (offset > sizes[shard] - size).any():
                raise ValueError(f"an image of {split} is where there can be none")
        if num_classes > len(splits["train"]["label"]):
            raise ValueError("there are more classes than images")
        names = about.get("classes")  # older indices have none
        if names is not None and (len(names) != num_classes or not all(isinstance(name, str) for name in names)):
            raise ValueError("it does not have a name for each class")
    except Exception as error:  # numpy, zipfile, its decompressors and json raise many kinds
        reason = printable(str(error) or type(error).__name__)
        raise UserError(f"--data shards: {place} is damaged ({reason}); pack the images again") from None
    return about, splits


def load_shards(
    args: Options, device: torch.device, on_bad_image: Callable[[UserError], None], index: bytes
) -> Data:
    """Return the images in the shards of --data-dir; `index` is empty unless rank 0 has read it for all ranks.

    Raises UserError if the index is missing or damaged, or a shard is missing or has another size.
    """
    url = url_of(args.data_dir)
    folder = url or str(args.data_dir)
    about, splits = parse_index(index or read_index(args), f"{folder}/{INDEX}")
    shards = about["shards"]
    if args.shuffle_block > 1 and not about.get("is_shuffled"):
        what = f"the shards of {folder} hold class after class, and so would batches"
        raise UserError(f"--shuffle-block {args.shuffle_block}: {what}; pack the images again")
    make: Callable[..., ShardedImages] = partial(ShardedImages, folder)
    if url:
        store = open_store(url, args.timeout_s)
        make = partial(RemoteImages, store, open_cache(store, args.cache_dir, shards) if args.cache_dir else None)
    else:
        check_sizes(folder, shards, ((args.data_dir / name).stat().st_size for name in shards))
    train, test = (make(list(shards), splits[split], args, split == "train") for split in SPLITS)
    data = data_of((train, test), about["num_classes"], args, device, on_bad_image)
    return replace(data, classes=about.get("classes", ()))


def pack(source: Path, folder: Path, shard_bytes: int) -> Iterator[tuple[str, int]]:
    """Pack the images below `source`, numbered as imagefolder lists them; yield each shard's name and image count.

    Raises:
        UserError: `source` is not an image folder, an image too large, or `folder` not empty or not writable.
        OSError: an image cannot be read, or the disk is full.
    """
    listing = find_images(source)
    with as_user_error("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"OUT {folder} is not empty; remove what it holds, or choose another folder")
    arrays: dict[str, Any] = {}
    shards: dict[str, int] = {}
    for split, samples in zip(SPLITS, (listing.train, listing.test), strict=True):
        order = list(range(len(samples)))  # evaluation reads val in this order
        if split == "train":
            order = permutation(len(samples), STORAGE_SEED, epoch=0).tolist()
        rows: dict[int, tuple[int, int, int, int, int]] = {}
        numbers = itertools.count()
        while len(rows) < len(samples):
            name, first = f"{split}-{next(numbers):06d}.tar", len(rows)
            with tarfile.open(folder / name, "x") as tar:
                while len(rows) < len(samples) and tar.offset < shard_bytes:
                    index = order[len(rows)]
                    path, label = samples[index]
                    content, key = read(os.path.join(source, path)), f"{index:08d}"
                    if len(content) > MAX_IMAGE_BYTES:
                        what = f"{source / path} has {len(content)} bytes, more than {MAX_IMAGE_BYTES}"
                        raise UserError(f"{what}; scale or remove it, then remove {folder} and pack again")
                    offset = tar.offset + tarfile.BLOCKSIZE  # after a header, which is one block for short names
                    add(tar, key + Path(path).suffix.lower(), content)
                    add(tar, f"{key}.cls", str(label).encode())
                    rows[index] = len(shards), offset, len(content), isal_zlib.crc32(content), label
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())  # the index, which is flushed last, says that all shards are whole
                shards[name] = file.seek(0, 2)
            yield name, len(rows) - first
        for number, (name, kind) in enumerate(FIELDS.items()):
            arrays[f"{split}_{name}"] = np.array([rows[index][number] for index in range(len(samples))], kind)
    classes = listing.classes
    about = {"num_classes": len(classes), "classes": classes, "shards": shards, "is_shuffled": True}
    write_index(folder, about, arrays)


def write_index(folder: Path, about: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write the index of a folder of shards, which parse_index() reads."""
    temporary = folder / f".{INDEX}"
    with open(temporary, "wb") as file:
        np.savez(file, about=np.array(json.dumps(about)), **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / INDEX)
    sync_folder(folder)


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file to an archive."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
