"""Sharded checkpoints: each rank writes its part to a file of its own, and step-N.pt makes them one.

A shard file holds the bytes of tensors, one after another, and nothing else. step-N.pt (checkpoint.py) has a
reference in place of each tensor: its shape, its dtype, and where its pieces are. Rank 0 writes it once all shard
files are on the disk, so that the checkpoint is whole or absent. Any part of a tensor can be read from the pieces
that overlap it, whichever ranks wrote them.

The idea is from torch.distributed.checkpoint, whose index is a pickle and so could run code when it is read.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from isal import isal_zlib
from torch import Tensor

from recipes.common.checkpoint.checkpoint import CheckpointFolder, reason_of
from recipes.common.checkpoint.reading import BadCheckpointError, ShardCheck, check_shards
from recipes.common.data.file_pool import FilePool
from recipes.common.errors import UserError, may_pass
from recipes.common.folders import names_in, refresh_names, sync_folder
from recipes.common.process.threads import begin_in_threads
from recipes.common.world.agreement import raise_first
from recipes.common.world.peers import Peers
from recipes.common.world.tree import map_tree

T = TypeVar("T")

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: the first index and the end (not included) in each dimension."""

Reference = dict[str, Any]
"""shape; dtype; pieces: int64, a row for each with the number of its file, the offset of its first byte there, and
the first index and the end in each dimension. Thousands of ranks have millions of pieces: too many for lists."""

BLOCK_BYTES = 8 * 2**20
"""A piece is read in blocks of about this size: only some of its columns may be kept."""


def is_reference(value: Any) -> bool:
    """Return whether a value of a checkpoint's content stands for a tensor in shard files."""
    return isinstance(value, dict) and "pieces" in value


def read_whole(content: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's content with all tensors whole in memory, whether it is sharded or not."""
    if not (shards := content.get("shards")):
        return content
    tensors: dict[str, Tensor] = {}

    def read(reference: Reference) -> Tensor:
        key = str({**reference, "pieces": pieces_of(reference).tolist()})  # a tied tensor has two names
        if key not in tensors:
            tensors[key] = read_box(reference, tuple((0, n) for n in reference["shape"]), shards, files)
        return tensors[key]

    with contextlib.closing(FilePool(len(shards["files"]))) as files:
        whole = map_tree(content, is_reference, read)
    return {key: value for key, value in whole.items() if key != "shards"}


def pieces_of(reference: Reference) -> Tensor:
    """Return the pieces of a reference, which version 0.2 wrote as lists: [file, offset, box]."""
    pieces = reference["pieces"]
    if isinstance(pieces, Tensor):
        return pieces
    rows = [[file, place, *itertools.chain.from_iterable(box)] for file, place, box in pieces]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), 2 + 2 * len(reference["shape"]))


def find_pieces(reference: Reference, box: Box) -> Iterator[tuple[int, int, Box, Box]]:
    """Yield the file, offset and box of each piece that overlaps a box, and what both have in common."""
    pieces, ndim = pieces_of(reference), len(box)
    boxes = pieces[:, 2:].view(len(pieces), ndim, 2)
    first, end = torch.tensor(box, dtype=torch.int64).view(ndim, 2).unbind(1)
    overlaps = (torch.maximum(boxes[..., 0], first) < torch.minimum(boxes[..., 1], end)).all(1)
    for file, place, *ends in pieces[overlaps].tolist():
        piece = tuple(zip(ends[::2], ends[1::2], strict=True))
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece, strict=True))
        yield file, place, piece, common


def read_box(reference: Reference, box: Box, shards: dict[str, Any], files: FilePool) -> Tensor:
    """Return a part of a tensor, read from the pieces that overlap it; their files stay open in `files`.

    Raises UserError if a file cannot be read, or does not match step-N.pt.
    """
    result = torch.empty([end - first for first, end in box], dtype=getattr(torch, reference["dtype"]))
    found = 0
    for number, place, piece, common in find_pieces(reference, box):
        path = Path(shards["folder"], shards["files"][number]["name"])
        target = result[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))]
        try:
            _read_piece(files.descriptor(str(path)), place, piece, common, target)
        except OSError as error:
            what = f"cannot read {path}: {reason_of(error)}; fix this, then resume again"
            raise UserError(what, is_passing=may_pass(error)) from None
        found += target.numel()
    if found != result.numel():
        what = f"the shard files in {shards['folder']} lack parts of a tensor"
        raise UserError(f"{what}; resume from another checkpoint")
    return result


def _read_piece(
    file: int, place: int, piece: Sequence[Sequence[int]], common: Sequence[Sequence[int]], target: Tensor
) -> None:
    """Read the part that a piece and a box have in common into the target, a block of rows at a time."""
    shape = [end - first for first, end in piece] or [1]
    (first, end), *columns = [(a - c, b - c) for (a, b), (c, _) in zip(common, piece, strict=True)] or [(0, 1)]
    row_bytes = math.prod(shape[1:]) * target.itemsize
    rows = max(1, BLOCK_BYTES // row_bytes)
    target = target.view(1) if not piece else target
    for row in range(first, end, rows):
        count = min(rows, end - row)
        buffer = torch.empty(count * row_bytes, dtype=torch.uint8)
        view, at = memoryview(buffer.numpy().data), 0
        while at < len(view):
            if not (size := os.preadv(file, [view[at:]], place + row * row_bytes + at)):
                raise OSError(f"it ends before byte {place + (row + count) * row_bytes}")
            at += size
        block = buffer.view(target.dtype).view(count, *shape[1:])
        kept = block[(slice(None), *(slice(*column) for column in columns))]
        target[row - first : row - first + count].copy_(kept)


@contextlib.contextmanager
def end_at_ctrl_c() -> Iterator[None]:
    """End at Ctrl-C by the signal itself: a daemon thread in torch's C++ code would abort Python's own end."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


@end_at_ctrl_c()
def share_checks(action: Callable[[ShardCheck], T], peers: Peers, timeout_s: float, allowed_s: float) -> T:
    """Return action(check), where check() divides the shard files among all ranks; call it on all ranks.

    Rank 0's action reads a checkpoint, in a thread, and may call check(). Until it is done, the other ranks help;
    then they call their own action, which must not call check(). `timeout_s` and `allowed_s` limit how long rank 0
    may be busy, as in wait_for_all().
    """
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def check(path: Path, files: list[dict[str, Any]]) -> None:
        if lost := {entry["name"] for entry in files} - names_in(path.parent):
            refresh_names(path.parent)  # this node may remember older names
            lost -= names_in(path.parent)
        if lost:
            raise BadCheckpointError(f"its shard file {min(lost)} is missing")
        found: Future[list[tuple[str, int]]] = Future()
        tasks.put((path, files, found))
        for text, status in sorted(found.result(), key=lambda pair: -pair[1]):  # unread proves nothing
            if text:
                raise UserError(text, is_passing=status == 1) if status else BadCheckpointError(text)

    if peers.rank == 0:
        [done] = begin_in_threads([partial(action, check)], 1)
        done.add_done_callback(lambda _: tasks.put(None))
    end = time.monotonic() + allowed_s
    request: Any = ()
    while request is not None:
        task: Any = ()  # path, files, and the future of what is wrong with them; None: rank 0's action is done
        if peers.rank == 0:
            with contextlib.suppress(queue.Empty):  # the action is busy
                task = tasks.get(timeout=timeout_s / 4 if time.monotonic() < end else None)
        try:
            with peers.watch("checkpoint", computes=True):
                # Sharding: rank 0 sends names of files, and each rank what is wrong with its share of them.
                request = peers.broadcast_object(task[:2] if task else task)
                faults = peers.gather_objects(_check_share(peers, *request)) if request else []
        except BaseException as error:
            if task:
                task[2].set_exception(error)  # otherwise the action would wait for ever
            raise
        if task:
            task[2].set_result(faults)
    return done.result() if peers.rank == 0 else action(check_shards)


def _check_share(peers: Peers, path: Path, files: list[dict[str, Any]]) -> tuple[str, int]:
    """Return what is wrong with this rank's share of the files, or "", and the exit status if one is unread."""
    try:
        own = files[peers.rank :: peers.world_size]
        # Rank 0 has seen all. If each of 4,096 ranks listed the folder, that would be 17 million names and more.
        for name in [entry["name"] for entry in own or files[:1]]:
            if not (path.parent / name).exists():
                refresh_names(path.parent)  # this node may remember older names
            if not (path.parent / name).exists():
                raise UserError(f"no {name} in {path.parent} on {socket.gethostname()}; let all ranks share it")
        check_shards(path, own)
    except LookupError:
        return "it does not say which shard files it has", 0
    except BadCheckpointError as error:
        return str(error), 0
    except (UserError, OSError) as error:
        return str(error), error.status if isinstance(error, UserError) else 2 - may_pass(error)
    return "", 0


def pack_pieces(own: list[list[tuple[int, Box]]]) -> bytes:
    """Return a rank's pieces of all tensors as bytes: how many numbers each tensor has, then all numbers."""
    flat = itertools.chain.from_iterable
    of_tensors = [list(flat((place, *flat(box)) for place, box in pieces)) for pieces in own]
    numbers = [len(of_tensors), *map(len, of_tensors), *flat(of_tensors)]
    return isal_zlib.compress(np.array(numbers, np.int64).tobytes(), 1)


def unpack_pieces(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return how many numbers each tensor has, and all of them: of each piece the offset and its box's ends."""
    numbers = np.frombuffer(isal_zlib.decompress(content), np.int64)
    sizes, numbers = np.split(numbers[1:], numbers[:1])
    return sizes, numbers


class ShardedFolder:
    """The checkpoints of a run whose ranks each write their part. All ranks call write().

    All ranks have the same `folder`; no other thread uses the connections of `peers`.
    """

    def __init__(self, folder: CheckpointFolder, peers: Peers) -> None:
        self.folder, self.peers, self._is_cleared = folder, peers, False

    def write(self, content: dict[str, Any], is_best: bool = False) -> Path:
        """Write this rank's part, wait for the others', and let rank 0 complete the checkpoint with step-N.pt.

        `parts` of the content are the tensors of this rank's file, in the order of its references; or the
        UserError of a rank whose state must not be saved.

        Raises UserError on all ranks if one of them failed; earlier checkpoints are unchanged.
        """
        if not self._is_cleared:
            # Sharding: rank 0 sends whether the others may write their first files, a few bytes a rank.
            raise_first(self.peers.gather_objects(self._clear()))
            self._is_cleared = True
        content = dict(content)
        parts, step = content.pop("parts"), content["position"]["step"]
        path = self.folder.folder / f"step-{step:09d}-{self.peers.rank:05d}-{secrets.token_hex(4)}.shard"
        entry, error = None, parts if isinstance(parts, UserError) else None
        try:
            entry = None if error else self._write_part(path, parts)
        except (OSError, RuntimeError, MemoryError) as failure:
            error = self.folder.write_error(path, path, failure)
        own: list[Any] = []
        map_tree(content, is_reference, lambda ref: own.append(ref["pieces"]))
        # Sharding: each rank sends its file's name and checksum, and a few bytes for each of its pieces. Rank 0
        # alone reads these: of 70 billion parameters on 1,024 ranks, they are two million.
        ranks = self.peers.gather_objects((entry, pack_pieces(own), error))
        errors = [error for _, _, error in ranks]
        if any(errors):
            with contextlib.suppress(OSError):  # the next checkpoint removes it, as after a kill
                path.unlink(missing_ok=True)
            raise_first(errors)
        commit = self._commit(content, ranks, is_best) if self.peers.rank == 0 else None
        # Sharding: rank 0 sends whether the checkpoint is complete. No rank begins another one before that.
        raise_first(self.peers.gather_objects(commit))
        return self.folder.folder / f"step-{step:09d}.pt"

    def _clear(self) -> UserError | None:
        """On rank 0, remove what an interrupted checkpoint has left; return the error if the run is another job's.

        It may be what a quota has no room for, so that no write would succeed and remove it.
        """
        try:
            if self.peers.rank == 0:
                self.folder.check_owner()
                self.folder.remove_old()
        except UserError as error:
            return error
        return None

    def _write_part(self, path: Path, parts: list[Tensor]) -> dict[str, Any] | None:
        """Write tensors to a new file and flush it; return its name, size and checksum, None without tensors."""
        if not parts:
            return None
        size = checksum = 0
        self.folder.folder.mkdir(exist_ok=True)  # no parents: the run's folder has to be the one that rank 0 made
        with open(path, "xb") as file:
            for part in parts:
                data = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
                checksum = isal_zlib.crc32(data, checksum)
                size += file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
        return {"name": path.name, "size": size, "crc32": checksum}

    def _commit(self, content: dict[str, Any], ranks: list[Any], is_best: bool) -> UserError | None:
        """Write step-N.pt, with the pieces of all ranks; return the error if it cannot be written."""
        files = [entry for entry, _, _ in ranks if entry]
        file_of = np.cumsum([bool(entry) for entry, _, _ in ranks]) - 1  # a rank without a file has no pieces
        of_ranks, numbers = zip(*(unpack_pieces(pieces) for _, pieces, _ in ranks), strict=True)
        sizes, all_numbers = np.stack(of_ranks), np.concatenate(numbers)
        starts = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
        tensors = itertools.count()

        def merge(reference: Reference) -> Reference:
            tensor, width = next(tensors), 1 + 2 * len(reference["shape"])
            own, start = sizes[:, tensor], starts[:, tensor]
            places = np.repeat(start - (np.cumsum(own) - own), own) + np.arange(own.sum())
            pieces = np.column_stack([np.repeat(file_of, own // width), all_numbers[places].reshape(-1, width)])
            return {**reference, "pieces": torch.from_numpy(pieces)}

        try:
            self.folder.check_owner()  # a newer job may have removed these files
            for entry in files:
                try:
                    size = (self.folder.folder / entry["name"]).stat().st_size
                except FileNotFoundError:
                    size = None
                if size != entry["size"]:
                    what = f"{entry['name']} is missing or of another size on rank 0"
                    raise OSError(f"{what}; let all ranks share --runs-dir")
            self.folder.write({**map_tree(content, is_reference, merge), "shards": {"files": files}}, is_best)
        except UserError as error:
            return error
        except OSError as error:
            return self.folder.write_error(self.folder.folder, None, error)
        return None
