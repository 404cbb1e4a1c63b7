"""Checkpoints that are whole or absent: written to a temporary file, flushed, then renamed.

A checkpoint is torch's own zip file, with a checksum of all its bytes behind it, and loads with
`torch.load(path, weights_only=True)`. It holds the whole model and optimizer under the names of the one-process
run (with --sharded-checkpoints, where their parts lie: shard_files.py), so that any recipe at any world size can
resume from it. The state of the random generators is the pair (seed, step): see seeding.py.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.process.entry import CHECKPOINT_THREAD

FORMAT = "cluster-recipes/1"
MUST_MATCH = (
    *("data", "image_size", "num_samples", "seq_len", "model", "task", "optimizer", "global_batch_size", "seed"),
)
"""Options that a resumed run must share with the run that wrote the checkpoint."""

_NAME = re.compile(r"step-(\d{9})\.pt")
_SHARD = re.compile(r"step-\d{9}-\d{5,}-[0-9a-f]{8}\.shard")
"""A file of a sharded checkpoint (shard_files.py)."""

_CHECKSUM = struct.Struct("<8sI")
"""What ends a checkpoint: a mark, and the CRC-32 of every byte before it.

The zip file's own checksums leave its directory out, and torch reads by that: a single bit of it that flips
makes torch take a tensor for a folder, and leave what happened to be in memory in its place.
"""
_MARK = b"crc32 =\0"


class BadCheckpointError(Exception):
    """The bytes of a file prove that it is no whole checkpoint of ours; the message says why."""


@dataclass
class Position:
    """Where a run stands. The place within an epoch follows from the step."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs trained and evaluated."""
    averages: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation: test_loss, test_accuracy, ..."""
    best_score: float = -math.inf
    """The highest score so far."""

    def record_evaluation(self, averages: dict[str, float], score: float) -> bool:
        """Count a finished epoch; return whether it is the best so far."""
        self.epoch += 1
        self.averages = averages
        is_best = score > self.best_score
        if is_best:  # max() would keep a score that is no number for ever
            self.best_score = score
        return is_best


def pack(
    args: Options,
    position: Position,
    model: dict[str, Any],
    optimizer: dict[str, Any],
    scaler: dict[str, Any],
    timed: dict[str, float] | None = None,
    data: dict[str, str] | None = None,
    skipped_steps: int = 0,
) -> dict[str, Any]:
    """Return the content of a checkpoint from the state dicts of the unwrapped model and the rest.

    `timed` are the steps and seconds of training that Throughput has counted, over all launches; `data` identifies
    the halves of the data set; `skipped_steps` were left out by --on-nonfinite skip.
    """
    return {
        "format": FORMAT,
        "options": {name: getattr(args, name) for name in MUST_MATCH},
        "position": asdict(position),
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
        "timed": timed or {"steps": 0, "seconds": 0.0},
        "data": data or {},
        "skipped_steps": skipped_steps,
    }


def position_of(content: dict[str, Any], steps_per_epoch: int, total_steps: int) -> Position:
    """Return where a checkpoint stands, for a run that may be longer than the one that wrote it."""
    values = content["position"]
    if "test_accuracy" in values:  # of version 0.1.0, which had no other tasks
        values = {
            **{name: values[name] for name in ("step", "epoch")},
            "averages": {"test_accuracy": values["test_accuracy"]},
            "best_score": values["best_accuracy"],
        }
    position = Position(**values)
    if position.step < total_steps:
        # A run that --max-steps ended within an epoch counted it as done; a longer run completes it.
        position.epoch = min(position.epoch, position.step // steps_per_epoch)
        # Of data that have shrunk, the epochs that it has more steps than are done.
        position.epoch = max(position.epoch, -(-position.step // steps_per_epoch) - 1)
    return position


def changes_of(before: dict[str, str], now: dict[str, str]) -> str:
    """Return a warning if the data are not those of the checkpoint, else ""; those of old versions do not say."""
    changed = [
        f"{half} is {now[half]} (was {text})" for half, text in before.items() if now.get(half, text) != text
    ]
    if not changed:
        return ""
    return (
        f"warning: the data have changed since the checkpoint was written: {', '.join(changed)}; from here on the "
        "order of samples is another one, and earlier evaluations do not compare"
    )


ShardCheck = Callable[[Path, list[dict[str, Any]]], None]
"""Checks the files that a sharded checkpoint names; raises as check_shards()."""


def read_checkpoint(path: Path, check: ShardCheck | None = None) -> dict[str, Any]:
    """Return a checkpoint's content with its tensors on the CPU; of a sharded one, with references in their place.

    `check` checks the shard files (default: this process does).

    Raises:
        BadCheckpointError: the file is cut, damaged (every byte is under a CRC-32) or not ours.
        UserError: the file cannot be read now (an I/O error, no memory), which proves nothing against it.
    """
    content, failure = None, None
    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(_check_bytes, path)  # beside the load: each takes about as long as the other
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # of damaged bytes torch makes a dozen kinds of errors, MemoryError among them
            failure = error
    try:
        checking.result()  # a checksum that does not match is the reason for whatever torch has raised
        if failure:
            raise failure
    except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: torch's own allocator and reader
        raise UserError(
            f"cannot read {path}: {reason_of(error)}; nothing was changed: fix this, then resume again"
        ) from error
    except BadCheckpointError:
        raise
    except Exception as error:
        raise BadCheckpointError(str(error).strip().split("\n")[0] or type(error).__name__) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadCheckpointError(f"not a checkpoint of this project (no format {FORMAT!r})")
    if "shards" in content:
        try:
            (check or check_shards)(path, content["shards"]["files"])
        except (LookupError, TypeError):
            raise BadCheckpointError("it does not say which shard files it has") from None
        content["shards"]["folder"] = str(path.parent)
    return content


def check_shards(path: Path, files: list[dict[str, Any]]) -> None:
    """Check every byte of shard files that a checkpoint names, some files at a time; none stays in memory.

    Raises:
        BadCheckpointError: one is missing, cut or damaged.
        UserError: one cannot be read now.
    """

    def check(entry: dict[str, Any]) -> None:
        name, checksum = entry["name"], 0
        if not _SHARD.fullmatch(name):
            raise BadCheckpointError(f"it names {name!r}, which is no shard file")
        try:
            with open(path.with_name(name), "rb") as file:
                is_whole = os.fstat(file.fileno()).st_size == entry["size"]
                while is_whole and (chunk := file.read(2**20)):
                    checksum = zlib.crc32(chunk, checksum)
        except FileNotFoundError:
            raise BadCheckpointError(f"its shard file {name} is missing") from None
        except OSError as error:
            remedy = "nothing was changed: fix this, then resume again"
            raise UserError(f"cannot read {error.filename}: {reason_of(error)}; {remedy}") from error
        if not is_whole or checksum != entry["crc32"]:
            raise BadCheckpointError(f"its shard file {name} is cut or damaged (its checksum does not match)")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, files))


def _check_bytes(path: Path) -> None:
    checksum = 0
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size - _CHECKSUM.size
        while left > 0 and (chunk := file.read(min(left, 2**20))):
            checksum = zlib.crc32(chunk, checksum)
            left -= len(chunk)
        if left > 0:
            raise OSError(errno.EIO, "it ended before its length while it was read", str(path))
        if left or file.read() != _CHECKSUM.pack(_MARK, checksum):
            raise BadCheckpointError(
                "cut, damaged, or no checkpoint of this project (its checksum does not match)"
            )


class _SummedFile:
    """Sum up what is written to a file, and end it with the checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.checksum = file, 0

    def write(self, data: bytes) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def end(self) -> None:
        self.file.write(_CHECKSUM.pack(_MARK, self.checksum))
        self.flush()


def check_options(args: Options, content: dict[str, Any], path: Path) -> None:
    """Refuse to resume from a checkpoint of other data, another model, batch or seed.

    Raises:
        UserError: naming the first option that differs.
    """
    for name, value in content["options"].items():
        if name == "image_size" and args.data not in ("imagefolder", "shards", "synthetic"):
            continue
        if name == "num_samples" and args.data != "synthetic":
            continue
        if name == "seq_len" and args.data != "text":
            continue
        if getattr(args, name) != value:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{path} was written with {flag} {value}, this run has {flag} {getattr(args, name)}; "
                "give the same, or start a new run without --resume"
            )


def names_in(folder: Path) -> set[str]:
    """Return what is in a folder: nothing where there is none. What cannot be read is an OSError."""
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


class CheckpointFolder:
    """The checkpoints of one run: step-000000123.pt, ..., and best.pt. Only rank 0 writes."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep

    def paths(self) -> list[Path]:
        """Return the checkpoints' paths, the newest first.

        Raises:
            OSError: the folder cannot be read; only one that is not there is empty.
        """
        names = sorted(names_in(self.folder), reverse=True)
        return [self.folder / name for name in names if _NAME.fullmatch(name)]

    def read_newest(self, set_aside: bool, check: ShardCheck | None = None) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest good checkpoint, or None where there has never been one.

        A bad one is skipped with a warning. With set_aside, those that are newer than the good one are
        renamed to *.bad, so that they never count among the newest again. `check`: as for read_checkpoint().

        Raises:
            UserError: there are checkpoints, and none of them is good; or one cannot be read.
            OSError: the folder cannot be read.
        """
        paths, bad = self.paths(), []
        for path in paths:
            try:
                content = read_checkpoint(path, check)
            except BadCheckpointError as error:
                print(f"warning: skipped {path}: {error}", file=sys.stderr, flush=True)
                bad.append(path)
                continue
            for old in bad if set_aside else ():
                old.rename(old.with_name(f"{old.name}.bad"))
            return path, content
        names = names_in(self.folder)
        others = sorted(name for name in names if name.endswith((".pt", ".pt.bad")))
        if others:
            none = f"none of the {len(paths)} checkpoints in {self.folder} is good"
            only = f"no good checkpoint in {self.folder}, only {', '.join(others[:3])}"
            best = (
                f"try --resume {self.folder / 'best.pt'} under another --name, or " if "best.pt" in names else ""
            )
            remedy = f"{best}begin again from step 0 with --overwrite and --resume none"
            raise UserError(f"{none if paths else only}; {remedy}")
        return None

    def write(self, content: dict[str, Any], is_best: bool = False) -> Path:
        """Write a checkpoint for the step it stands at, then remove the oldest.

        Raises:
            UserError: the disk is full or the folder cannot be written; what was there is untouched.
        """
        step = content["position"]["step"]
        path = self.folder / f"step-{step:09d}.pt"
        temporary = path.with_suffix(".tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.tmp"):
                leftover.unlink()
            with open(temporary, "wb") as file:
                summed = _SummedFile(file)
                torch.save(content, summed)  # type: ignore[arg-type]  # it calls write() and flush()
                summed.end()
                os.fsync(file.fileno())
            if is_best:
                _link(temporary, self.folder / "best.pt")  # first: a kill after it repeats the steps to this one
            temporary.replace(path)
            sync_folder(self.folder)
        except (OSError, RuntimeError, MemoryError) as error:
            raise self.cannot_write(path, temporary, error) from error
        self._remove_old()
        return path

    def cannot_write(self, path: Path, temporary: Path | None, error: BaseException) -> UserError:
        """Remove what a failed write of path has left; return its error, with the checkpoint to resume from."""
        try:
            if temporary:
                temporary.unlink(missing_ok=True)
            newest = next(iter(self.paths()), None)
            left = f"{newest} is intact" if newest else "there is no earlier one"
        except OSError:
            left = f"those in {self.folder} are as they were"
        return UserError(f"cannot write {path}: {reason_of(error)}; {left}: fix this, then add --resume auto")

    def _remove_old(self) -> None:
        try:
            for old in self.paths()[self.keep :]:
                old.unlink(missing_ok=True)
            self._remove_shards()
        except OSError as error:  # one too many does no harm, and the next write tries again
            print(f"warning: cannot remove old checkpoints: {error}", file=sys.stderr, flush=True)

    def _remove_shards(self) -> None:
        """Remove the shard files that no checkpoint names: of those removed, and of writes that were cut off."""
        names = names_in(self.folder)
        unused = {name for name in names if _SHARD.fullmatch(name)}
        if not unused:
            return
        for name in [name for name in names if _NAME.fullmatch(name) or name == "best.pt"]:
            try:
                shards = torch.load(self.folder / name, mmap=True, weights_only=True).get("shards")
            except Exception as error:  # as in read_checkpoint(); what a damaged one names stays, until it goes
                raise OSError(f"{name} does not say which shard files it has: {reason_of(error)}") from error
            unused -= {entry["name"] for entry in shards["files"]} if shards else set()
        for name in unused:
            (self.folder / name).unlink(missing_ok=True)


class Folder(Protocol):
    """Where a CheckpointWriter writes."""

    def write(self, content: dict[str, Any], is_best: bool = False) -> Path:
        """Write a checkpoint; return its path."""


class CheckpointWriter:
    """Write checkpoints while training continues: a copy is taken at once, a thread writes it, one at a time.

    `stalls_s` are the seconds for which each has held up training.
    """

    def __init__(self, folder: Folder, on_error: Callable[[UserError], None]) -> None:
        self.folder, self.on_error = folder, on_error
        self.stalls_s: list[float] = []
        self.newest: Path | None = None
        self._copy: Any = None
        self._thread: threading.Thread | None = None

    def begin(self, content: dict[str, Any], is_best: bool = False) -> None:
        """Take a copy of the content and have it written; where that fails, on_error gets the reason."""
        started = time.perf_counter()
        self.wait()
        # The memory of the last copy serves again: its pages are there already.
        self._copy = copy_tree(content, self._copy)
        what = (self._copy, is_best)
        self._thread = threading.Thread(target=self._write_aside, args=what, name=CHECKPOINT_THREAD)
        self._thread.start()
        self.stalls_s.append(time.perf_counter() - started)

    def write(self, content: dict[str, Any], is_best: bool = False) -> None:
        """Write the content before training continues."""
        started = time.perf_counter()
        self.wait()
        self._write(content, is_best)
        self.stalls_s.append(time.perf_counter() - started)

    def wait(self) -> None:
        """Wait until what was begun is on the disk, or has failed."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def _write_aside(self, content: dict[str, Any], is_best: bool) -> None:
        try:
            self._write(content, is_best)
        except RuntimeError as error:  # by a connection; of the gradients', the main thread has more to say
            self.on_error(UserError(f"lost another rank while a checkpoint was written: {reason_of(error)}"))

    def _write(self, content: dict[str, Any], is_best: bool) -> None:
        try:
            self.newest = self.folder.write(content, is_best)
        except UserError as error:
            self.on_error(error)


def copy_tree(value: Any, old: Any = None) -> Any:
    """Return a copy on the CPU of nested dicts, lists and tensors, in the memory of an old one where it fits.

    What shares memory, such as a tied matrix under both of its names, shares its copy: a file has it once.
    """
    copies: dict[Any, torch.Tensor] = {}
    used: set[int] = set()

    def copy_tensor(value: torch.Tensor, old: Any) -> torch.Tensor:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return value.to("cpu", copy=True)  # sparse, a DTensor or the like: it has no address of its own
        view = value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()
        place = value.device, value.data_ptr(), *view
        if place not in copies:
            fits = isinstance(old, torch.Tensor) and old.shape == value.shape and old.dtype == value.dtype
            copies[place] = old.copy_(value) if fits and id(old) not in used else value.to("cpu", copy=True)
            used.add(id(old))
        return copies[place]

    def copy(value: Any, old: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return copy_tensor(value.detach(), old)
        if isinstance(value, dict):
            olds = old if isinstance(old, dict) else {}
            return {key: copy(item, olds.get(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            others = old if isinstance(old, list | tuple) and len(old) == len(value) else [None] * len(value)
            return type(value)(copy(item, other) for item, other in zip(value, others, strict=True))
        return value

    return copy(value, old)


def reason_of(error: BaseException) -> str:
    """Return the system's reason for a failed read or write, which torch may have wrapped."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            hint = " (free some space)" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            return f"{cause.strerror}{hint}"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, MemoryError):
        return "out of memory"
    return str(error).strip().split("\n")[0]


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _link(path: Path, target: Path) -> None:
    """Let target be the same file as path (a copy where the file system has no hard links)."""
    temporary = target.with_suffix(".tmp")
    try:
        os.link(path, temporary)
    except OSError:
        with open(path, "rb") as source, open(temporary, "wb") as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
    temporary.replace(target)
