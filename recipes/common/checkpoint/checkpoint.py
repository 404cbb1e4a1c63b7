"""Checkpoints that are whole or absent: written to a temporary file, flushed, then renamed.

A checkpoint is torch's own zip file, followed by a checksum of all its bytes, and loads with
`torch.load(path, map_location="cpu", weights_only=True)`. It holds the whole model and optimizer under the names
of the one-process run (with --sharded-checkpoints, references to their parts: shard_files.py), so that any recipe
at any world size can resume from it (reading.py). The state of the random generators is the pair (seed, step): see
seeding.py.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from isal import isal_zlib

from recipes.common.errors import FULL, UserError, may_pass, os_error_of
from recipes.common.folders import names_in, sync_folder
from recipes.common.options import Options
from recipes.common.process.entry import CHECKPOINT_THREAD
from recipes.common.world.tree import map_tree

FORMAT = "cluster-recipes/1"
MUST_MATCH = (
    *("data", "image_size", "num_samples", "seq_len", "shuffle_block", "model", "task", "optimizer"),
    *("global_batch_size", "seed"),
)
"""Options that a resumed run must share with the run that wrote the checkpoint."""

HAS_CHECKPOINTS = "has-checkpoints"
"""A file in a run's folder that stays if its checkpoints are lost: then the run is not begun again from step 0."""
CHECKPOINT_NAME = re.compile(r"step-(\d{9})\.pt")
SHARD_NAME = re.compile(r"step-\d{9}-\d{5,}-[0-9a-f]{8}\.shard")
"""A file of a sharded checkpoint (shard_files.py)."""

CHECKSUM_TRAILER = struct.Struct("<8sI")
"""The end of a checkpoint: a mark, and the CRC-32 of every byte before it.

The zip file's own checksums do not cover its directory, which torch relies on: a single flipped bit there makes
torch mistake a tensor for a folder, and return uninitialised memory in its place.
"""
CHECKSUM_MARK = b"crc32 =\0"


@dataclass
class Position:
    """The progress of a run. The position within an epoch follows from the step."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs trained and evaluated."""
    averages: dict[str, float] = field(default_factory=dict)
    """Averages of the last evaluation: test_loss, test_accuracy, ..."""
    best_score: float = -math.inf
    """The highest score so far."""
    evaluated_step: int = 0
    """The step of the last evaluation."""

    def record_evaluation(self, averages: dict[str, float], score: float, ends_epoch: bool = True) -> bool:
        """Keep an evaluation, and count the epoch that it ends; return whether it is the best so far."""
        self.epoch += ends_epoch
        self.averages, self.evaluated_step = averages, self.step
        is_best = score > self.best_score
        if is_best:  # max() would keep a NaN forever
            self.best_score = score
        return is_best


def pack(
    args: Options,
    position: Position,
    model: dict[str, Any],
    optimizer: dict[str, Any],
    scaler: dict[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """Return the content of a checkpoint, from the state dicts of the unwrapped model and the other parts.

    `more` are timed (steps and seconds of training, over all launches), data (which identifies the splits of the
    data set), skipped_steps (by --on-nonfinite skip), code (digests of the user's), and best (what best_score is
    a score of).
    """
    return {
        "format": FORMAT,
        "options": {name: getattr(args, name) for name in MUST_MATCH},
        "position": asdict(position),
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
        **more,
    }


class _SummedFile:
    """Compute the checksum of what is written to a file, and append it at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.checksum = file, 0

    def write(self, data: bytes) -> int:
        self.checksum = isal_zlib.crc32(data, self.checksum)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def end(self) -> None:
        self.file.write(CHECKSUM_TRAILER.pack(CHECKSUM_MARK, self.checksum))
        self.flush()


class CheckpointFolder:
    """The checkpoints of one run: step-000000123.pt, ..., and best.pt. Only rank 0 writes.

    The newest `keep` are kept. `check_owner` raises UserError if another job has taken over the run. `sign` is the
    path of HAS_CHECKPOINTS, which is made once a checkpoint is written.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        check_owner: Callable[[], None] = lambda: None,
        sign: Path | None = None,
    ) -> None:
        self.folder, self.keep, self.check_owner, self.sign = folder, keep, check_owner, sign
        self._shards: dict[tuple[int, ...], set[str]] = {}
        """Names of shard files by the identity of the checkpoint that names them, which takes long to read."""

    def paths(self) -> list[Path]:
        """Return the checkpoints' paths, the newest first; raises OSError if the folder cannot be read."""
        names = sorted(names_in(self.folder), reverse=True)
        return [self.folder / name for name in names if CHECKPOINT_NAME.fullmatch(name)]

    def write(self, content: dict[str, Any], is_best: bool = False) -> Path:
        """Write a checkpoint, named by its step, then remove the oldest ones.

        Raises UserError if the disk is full or the folder cannot be written (earlier checkpoints are unchanged),
        or another job has taken over the run.
        """
        step = content["position"]["step"]
        path = self.folder / f"step-{step:09d}.pt"
        temporary = path.with_suffix(".tmp")
        self.check_owner()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.tmp"):
                leftover.unlink(missing_ok=True)  # an older job, which check_owner() stops, may still write it
            with open(temporary, "wb") as file:
                summed = _SummedFile(file)
                torch.save(content, summed)  # type: ignore[arg-type]  # it calls write() and flush()
                summed.end()
                os.fsync(file.fileno())
            self.check_owner()  # writing may have taken long
            if is_best:
                _link(temporary, self.folder / "best.pt")  # first: a run that is killed here repeats these steps
            temporary.replace(path)
            sync_folder(self.folder)
            if self.sign:
                self.sign.touch()
            if "shards" in content:
                self._shards[identity_of(path)] = shards_of(content)
        except (OSError, RuntimeError, MemoryError) as error:
            raise self.write_error(path, temporary, error) from error
        self.remove_old()
        return path

    def write_error(self, path: Path, temporary: Path | None, error: BaseException) -> UserError:
        """Remove what a failed write has left behind; return the error, with the checkpoint to resume from."""
        try:
            if temporary:
                temporary.unlink(missing_ok=True)
            newest = next((found for found in self.paths() if found != path), None)  # it may have been renamed
            left = f"{newest} is intact" if newest else "there is no earlier one"
        except OSError:
            left = f"those in {self.folder} are as they were"
        what = f"cannot write {path}: {reason_of(error)}; {left}: fix this, then add --resume auto"
        return UserError(what, is_passing=may_pass(error))

    def remove_old(self) -> None:
        """Remove the oldest checkpoints, and what interrupted ones have left; if that fails, print a warning."""
        try:
            for old in self.paths()[self.keep :]:
                old.unlink(missing_ok=True)
            self._remove_shards()
        except OSError as error:  # an extra one does no harm, and the next write tries again
            print(f"warning: cannot remove old checkpoints: {error}", file=sys.stderr, flush=True)

    def _remove_shards(self) -> None:
        """Remove the shard files that no checkpoint names: from removed checkpoints and interrupted writes."""
        names = names_in(self.folder)
        unused = {name for name in names if SHARD_NAME.fullmatch(name)}
        if not unused:
            return
        known, self._shards = self._shards, {}
        for name in [name for name in names if CHECKPOINT_NAME.fullmatch(name) or name == "best.pt"]:
            path = self.folder / name
            own = identity_of(path)
            try:
                if own not in known:
                    known[own] = shards_of(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
            except Exception as error:  # as in reading.py; all shard files stay while one is damaged
                raise OSError(f"{name} does not say which shard files it has: {reason_of(error)}") from error
            self._shards[own] = known[own]
            unused -= known[own]
        for name in unused:
            (self.folder / name).unlink(missing_ok=True)


def identity_of(path: Path) -> tuple[int, ...]:
    """Return what distinguishes a file from others that have had its name; hard links have the same."""
    about = path.stat()
    return about.st_ino, about.st_mtime_ns, about.st_size


def shards_of(content: dict[str, Any]) -> set[str]:
    """Return the names of a checkpoint's shard files, none if it is not sharded."""
    return {entry["name"] for entry in content.get("shards", {"files": ()})["files"]}


class CheckpointWriter:
    """Write checkpoints in a thread, one at a time; from a copy, so that training can continue.

    `write` is a folder's write(). `stalls_s` are the seconds for which each checkpoint has held up training.
    """

    def __init__(
        self, write: Callable[[dict[str, Any], bool], Path], on_error: Callable[[UserError], None]
    ) -> None:
        self._write, self.on_error = write, on_error
        self.stalls_s: list[float] = []
        self.newest: Path | None = None
        self._copy: Any = None
        self._thread: threading.Thread | None = None

    def begin(self, content: dict[str, Any], is_best: bool = False, copies: bool = True) -> None:
        """Write the content in a thread; if that fails, on_error gets the error.

        What is written is a copy; with copies=False, it is the content itself, which has to stay as it is.
        """
        self.wait()  # one at a time; the checkpoint before counts this
        started = time.perf_counter()
        if copies:
            # The memory of the last copy is used again: its pages are there already.
            content = self._copy = copy_tree(content, self._copy)
        self._thread = threading.Thread(target=self._write_aside, args=(content, is_best), name=CHECKPOINT_THREAD)
        self._thread.start()
        self.stalls_s.append(time.perf_counter() - started)

    def wait(self, bound_s: float | None = None) -> bool:
        """Wait for at most so long; return whether the write that was begun is on the disk, or has failed."""
        if not self._thread:
            return True
        started = time.perf_counter()
        self._thread.join(bound_s)
        self.stalls_s[-1] += time.perf_counter() - started
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def _write_aside(self, content: dict[str, Any], is_best: bool) -> None:
        try:
            self.newest = self._write(content, is_best)
        except UserError as error:
            self.on_error(error)
        except RuntimeError as error:  # a lost connection; if it is the gradients', the main thread reports more
            what = f"lost another rank while a checkpoint was written: {reason_of(error)}"
            self.on_error(UserError(what, is_passing=True))
        except Exception as error:  # such as pickle's
            what = f"{type(error).__name__}: {reason_of(error)}"
            self.on_error(UserError(f"cannot write a checkpoint: {what}; fix this, then add --resume auto"))


def copy_tree(value: Any, old: Any = None) -> Any:
    """Return a copy on the CPU of nested dicts, lists and tensors, in the memory of an old copy where it fits.

    Tensors that share memory, such as a tied matrix under both of its names, share their copy: a file has it once.
    """
    copies: dict[Any, torch.Tensor] = {}
    used: set[int] = set()
    olds: list[torch.Tensor] = []
    map_tree(old, torch.is_tensor, olds.append)
    rest, none = iter(olds), torch.empty(0)

    def copy_tensor(value: torch.Tensor) -> torch.Tensor:
        value, old = value.detach(), next(rest, none)
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return value.to("cpu", copy=True)  # sparse, a DTensor or the like: it has no address of its own
        view = value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()
        place = value.device, value.data_ptr(), *view
        if place not in copies:
            fits = type(old) is torch.Tensor and old.layout is torch.strided
            fits = fits and (old.shape, old.dtype) == (value.shape, value.dtype)
            copies[place] = old.copy_(value) if fits and id(old) not in used else value.to("cpu", copy=True)
            used.add(id(old))
        return copies[place]

    return map_tree(value, torch.is_tensor, copy_tensor)


def reason_of(error: BaseException) -> str:
    """Return the system's reason for a failed read or write, which torch may have wrapped."""
    if found := os_error_of(error):
        return f"{found.strerror}{' (free some space)' if found.errno in FULL else ''}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return str(error).strip().split("\n")[0]


def _link(path: Path, target: Path) -> None:
    """Make target the same file as path (a copy if the file system has no hard links)."""
    temporary = target.with_suffix(".tmp")
    try:
        os.link(path, temporary)
    except OSError:
        with open(path, "rb") as source, open(temporary, "wb") as file:
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(target)
