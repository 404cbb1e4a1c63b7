"""Images packed into tar files, and an index of where each lies: few large files instead of many small ones.

`make shards DATA_DIR=/data/imagenet OUT=/data/imagenet-shards` packs an image folder, in its order: a run on the
shards gives the very numbers of a run on the folder. The layout is WebDataset's (https://github.com/webdataset),
00000007.jpg and 00000007.cls one after the other, so that others can read the shards too.

An image is read where the index says, whichever the order: one read without an open, and its checksum is compared.
From a server (remote.py) threads read ahead what the next batches need; with --cache-dir, images that lie side by
side at once, and seldom a byte twice.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import resource
import stat
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.common.data.imagefolder import Decoded, Images, data_of, walk
from recipes.common.data.images import read
from recipes.common.data.remote import PART_BYTES, PAUSES, Store, open_store, printable, readers
from recipes.common.data.splits import Data
from recipes.common.data.workers import Keys
from recipes.common.errors import UserError
from recipes.common.options import Options, url_of

INDEX = "index.npz"
"""Written last: a folder without it is not whole."""

FIELDS = {"shard": np.int32, "offset": np.int64, "size": np.int32, "crc": np.uint32, "label": np.int64}
"""Of each image: the number of its shard, where it lies there, its bytes, their CRC-32, and its class."""

HALVES = ("train", "val")

READS = 3
"""Of a part at most, until its bytes are those that were packed."""

IS_UP = "see that the server is up and has it"

MAX_INDEX_BYTES, MAX_IMAGE_BYTES = 2**31, 2**28
"""A server may send no more: 28 bytes an image, and an image."""


class ShardedImages(Images):
    """Images in shards.

    Args:
        folder: of the shards, or its URL.
        shards: their names.
        fields: arrays of FIELDS, a number for each image.
        args: as for the other images.
        train: whether crops and flips are drawn.
    """

    def __init__(
        self, folder: str, shards: list[str], fields: dict[str, np.ndarray], args: Options, train: bool
    ) -> None:
        super().__init__(args.image_size, args.seed, train)
        self.folder, self.shards = folder, shards
        # Tensors lie in memory that all workers of a rank share.
        self.fields = {name: torch.from_numpy(fields[name].astype(np.int64)) for name in FIELDS}
        self.labels = self.fields["label"]
        self.files: dict[tuple[int, int], int] = {}
        """Open files, by process and shard: a fork would share the position, which pread() does not use."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_files = len(self.shards) if limit == resource.RLIM_INFINITY else max(1, limit // 4)
        """Kept open: a few terabytes have more shards than a process may open, and batches are files, too."""

    def path(self, index: int) -> str:
        """Return the shard of an image and its place there."""
        return f"{self.folder}/{self._shard(index)} at byte {int(self.fields['offset'][index])}"

    def _shard(self, index: int) -> str:
        return self.shards[int(self.fields["shard"][index])]

    def _of(self, index: int, *names: str) -> tuple[int, ...]:
        return tuple(int(self.fields[name][index]) for name in names)

    def read(self, index: int) -> bytes:
        """Return an image's file.

        Raises:
            OSError: the shard cannot be read.
            ValueError: the bytes are not those that were packed.
        """
        shard, offset, size, crc = self._of(index, "shard", "offset", "size", "crc")
        key = os.getpid(), shard
        if key not in self.files:
            if len(self.files) >= self.most_files:
                os.close(self.files.pop(next(iter(self.files))))
            self.files[key] = os.open(f"{self.folder}/{self.shards[shard]}", os.O_RDONLY | os.O_CLOEXEC)
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


class RemoteImages(ShardedImages):
    """Images in shards on a server.

    What has been read stays in the cache, a file for each shard with holes for what has not: an image is there if
    its checksum is right. So any number of processes write it without a lock, and a crash costs what is cut.

    Args:
        store: the folder of the shards.
        cache: the folder of their copies on this node; None: none is kept.
    """

    ahead = 64
    """At least so many images of the next batches are read before their turn."""

    def __init__(self, store: Store, cache: Path | None, *others: Any) -> None:
        super().__init__(store.url, *others)
        self.store, self.cache = store, cache
        self.parts = (self.fields["shard"] << 40) + self.fields["offset"] // PART_BYTES
        """The same number for images that are read at once, in ascending order."""
        self.pending: dict[int, Future[bytes]] = {}
        self.failures: dict[int, tuple[float, int | None, str | None]] = {}
        """Of each part's first image, when its last read failed and of what."""

    def __getitems__(self, keys: Keys) -> list[Decoded]:
        """Return a batch, and begin to read the next ones; from an image on that cannot be read, all are blank.

        It ends the run. To wait for the others, too, takes as long as other ranks wait, many times over.
        """
        wanted = dict.fromkeys([*(index for _, index in keys), *(index for _, index in keys.ahead)])
        for index in self.pending.keys() - wanted:
            self.pending.pop(index).cancel()
        for index in wanted:
            if index not in self.pending:
                self.pending[index] = self._begin(index)
        samples: list[Decoded] = []
        for key in keys:
            samples.append(self[key])
            if samples[-1].is_unread:
                break
        return samples + [samples[-1]._replace(fault="")] * (len(keys) - len(samples))

    def read(self, index: int) -> bytes:
        """Return an image's file; raises as that of shards on a disk."""
        future = self.pending.pop(index, None) or self._begin(index)
        return self.store.result(future)

    def _begin(self, index: int) -> Future[bytes]:
        return readers(os.getpid()).submit(self._load, index, time.monotonic())

    def _load(self, index: int, asked_s: float) -> bytes:
        if not self.cache:
            return self._fetch(index, index, index + 1)
        first, end = (
            int(torch.searchsorted(self.parts, self.parts[index], right=right)) for right in (False, True)
        )
        locks = readers(os.getpid()).locks
        with locks[first % len(locks)]:  # another thread may be fetching the part
            content = self._read_cache(index)
            if content is not None:
                return content
            failed_s, *failure = self.failures.get(first, (0.0, None, ""))
            if failed_s > asked_s:  # while this waited: if all that wait asked again, each would take the bound
                raise OSError(*failure)
            try:
                return self._fetch(index, first, end)
            except OSError as error:
                self.failures[first] = time.monotonic(), error.errno, error.strerror
                raise

    def _read_cache(self, index: int) -> bytes | None:
        assert self.cache
        offset, size, crc = self._of(index, "offset", "size", "crc")
        path = self.cache / self._shard(index)
        try:
            file = open_cached(path, os.O_RDONLY)
            try:
                content = os.pread(file, size, offset)
            finally:
                os.close(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OSError(error.errno, f"--cache-dir cannot read {path}: {error.strerror}") from None
        return content if zlib.crc32(content) == crc else None

    def _fetch(self, index: int, first: int, end: int) -> bytes:
        """Read the images from first to before end, which lie side by side; return one of them."""
        start, (offset, size, crc) = self._of(first, "offset")[0], self._of(index, "offset", "size", "crc")
        # No read begins that may take longer than what waits for this one.
        last_s = time.monotonic() + self.store.longest_s - self.store.attempt_s * (len(PAUSES) + sum(PAUSES))
        for reads in range(1, READS + 1):
            part = self.store.read(self._shard(index), start, sum(self._of(end - 1, "offset", "size")))
            content = part[offset - start :][:size]
            if zlib.crc32(content) == crc:
                break
            if reads == READS or time.monotonic() > last_s:
                times = f"{reads} time{'s' * (reads > 1)}"
                raise OSError(errno.EIO, f"the server sent other bytes than were packed, {times}")
        if self.cache:
            path = self.cache / self._shard(index)
            try:
                file = open_cached(path, os.O_WRONLY | os.O_CREAT)
                try:
                    if os.pwrite(file, part, start) < len(part):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                finally:
                    os.close(file)
            except OSError as error:
                raise OSError(error.errno, f"--cache-dir cannot keep {path}: {error.strerror}") from None
        return content


def read_remote_index(args: Options) -> bytes:
    """Return the index in --data-dir if that is on a server, else nothing; raises UserError."""
    return read_index(args) if url_of(args.data_dir) else b""


def read_index(args: Options) -> bytes:
    """Return the index in --data-dir; of a server, rank 0 reads it for all, and compares the sizes of the shards.

    Raises:
        UserError: the index or a shard is missing, or a shard has another size.
    """
    url = url_of(args.data_dir)
    place = f"{url or args.data_dir}/{INDEX}"
    try:
        if not url:
            return (args.data_dir / INDEX).read_bytes()
        store = open_store(url, args.timeout_s)
        [size] = store.results(store.size, [(INDEX,)])
        if not 0 < size <= MAX_INDEX_BYTES:
            raise UserError(f"--data shards: {place} has {size} bytes; pack the images again")
        parts = [(INDEX, start, min(start + PART_BYTES, size)) for start in range(0, size, PART_BYTES)]
        content = b"".join(store.results(store.read, parts))
    except OSError as error:
        fix = IS_UP if url else "pack an image folder by `make shards DATA_DIR=... OUT=...`"
        raise UserError(f"--data shards: cannot read {place} ({error.strerror or error}); {fix}") from None
    shards = parse_index(content, place)[0]["shards"]
    sizes = store.results(store.size, [(name,) for name in shards])
    check_sizes(url, shards, lambda name: next(sizes))
    return content


def check_sizes(folder: str, shards: dict[str, int], size_of: Callable[[str], int]) -> None:
    """Compare the sizes of all shards with those of the index; raises UserError."""
    for name, size in shards.items():
        try:
            found = size_of(name)
        except OSError as error:
            fix = IS_UP if "://" in folder else "copy it again"
            raise UserError(f"--data shards: cannot read {folder}/{name} ({error.strerror}); {fix}") from None
        if found != size:
            raise UserError(f"--data shards: {folder}/{name} has {found} bytes instead of {size}; copy it again")


def parse_index(content: bytes, place: str) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """Return what the index says of the whole and, by half, of each image.

    Raises:
        UserError: it is not an index, or an image lies outside of its shard, or a shard outside of the folder.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_INDEX_BYTES:
                raise ValueError("it unpacks to more than an index")
        with np.load(io.BytesIO(content), allow_pickle=False) as index:
            about = json.loads(str(index["about"]))
            halves = {half: {name: index[f"{half}_{name}"] for name in FIELDS} for half in HALVES}
        if not all(type(value) is int for value in (about["num_classes"], *about["shards"].values())):
            raise ValueError("a size or num_classes is no whole number")
        names, sizes = list(about["shards"]), np.array(list(about["shards"].values()), np.int64)
        if strange := [name for name in names if not re.fullmatch(r"\w[\w.-]*", name)]:
            raise ValueError(f"{strange[0]!r} is no shard's name")
        for half, fields in halves.items():
            for name, kind in FIELDS.items():
                if fields[name].dtype != kind:
                    raise ValueError(f"{half}_{name} is {fields[name].dtype} instead of {np.dtype(kind)}")
            shard, offset, size, _, label = (fields[name].astype(np.int64) for name in FIELDS)
            if not len(label) or len({fields[name].shape for name in FIELDS}) != 1 or label.ndim != 1:
                raise ValueError(f"{half} has no images, or not all of them have all fields")
            sound = [shard >= 0, shard < len(names), offset >= 0, size > 0, size <= MAX_IMAGE_BYTES]
            sound += [label >= 0, label < about["num_classes"], np.diff((shard << 40) + offset) > 0]
            if not all(values.all() for values in sound) or (offset + size > sizes[shard]).any():
                raise ValueError(f"an image of {half} is where there can be none")
        if about["num_classes"] > len(halves["train"]["label"]):
            raise ValueError("there are more classes than images")
    except Exception as error:  # numpy, zipfile, its decompressors and json have many kinds
        reason = printable(str(error) or type(error).__name__)
        raise UserError(f"--data shards: {place} is damaged ({reason}); pack the images again") from None
    return about, halves


def check_own(folder: Path, about: os.stat_result) -> None:
    """Raise an OSError unless a folder is this user's, who alone can write to it."""
    if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode):
        raise OSError(errno.EPERM, "it is a link, or another user's")
    if about.st_mode & 0o022:
        raise OSError(errno.EPERM, f"others, too, can write to it: chmod go-w {folder}")


def open_cached(path: Path, flags: int) -> int:
    """Open a file of the cache; no link is followed, also where others can rename the cache's folder."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        check_own(path.parent, os.fstat(folder))
        return os.open(path.name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    finally:
        os.close(folder)


def open_cache(args: Options, url: str, shards: dict[str, int]) -> Path | None:
    """Return the folder of --cache-dir that is for these shards, which has room for them; None without one.

    Raises:
        UserError: it cannot be made, others can write to it, or its disk is too full.
    """
    if not args.cache_dir:
        return None
    folder = args.cache_dir / f"{url.split('/')[-1]}-{zlib.crc32(url.encode()):08x}"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        check_own(folder, folder.lstat())
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        kept = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
        disk = os.statvfs(folder)
    except OSError as error:
        fix = "give a folder on a disk of the node that this user alone can write to"
        raise UserError(f"--cache-dir: cannot use {folder} ({error.strerror}); {fix}") from None
    free, missing = disk.f_bavail * disk.f_frsize, sum(shards.values()) - kept
    if missing > free:
        raise UserError(
            f"--cache-dir: {folder} needs {missing / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} GB free; "
            "make room, give another folder, or go without a cache"
        )
    return folder


def load_shards(
    args: Options, device: torch.device, on_bad_image: Callable[[UserError], None], index: bytes | None = None
) -> Data:
    """Return the images in the shards of --data-dir; `index` is what rank 0 has read of it, if another rank has.

    Raises:
        UserError: the index is missing or damaged, or a shard is missing or has another size.
    """
    url = url_of(args.data_dir)
    folder = url or str(args.data_dir)
    about, halves = parse_index(index or read_index(args), f"{folder}/{INDEX}")
    sizes, shards = about["shards"], list(about["shards"])
    make: Callable[..., ShardedImages] = partial(ShardedImages, folder)
    if url:
        make = partial(RemoteImages, open_store(url, args.timeout_s), open_cache(args, url, sizes))
    else:
        check_sizes(folder, sizes, lambda name: (args.data_dir / name).stat().st_size)
    train, test = (make(shards, halves[half], args, half == "train") for half in HALVES)
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
    write_index(folder, {"num_classes": listing.num_classes, "shards": shards}, arrays)


def write_index(folder: Path, about: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write the index of a folder of shards: what parse_index() reads."""
    temporary = folder / f".{INDEX}"
    with open(temporary, "wb") as file:
        np.savez(file, about=np.array(json.dumps(about)), **arrays)
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
