"""Read checkpoints, as a resume does: whole, undamaged and of a run like this one, or not at all.

A checkpoint counts as bad only if the bytes of a file prove it. An error of the machine, which may pass, does not.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from isal import isal_zlib

from recipes.common.checkpoint.checkpoint import (
    CHECKSUM_MARK,
    CHECKSUM_TRAILER,
    FORMAT,
    MUST_MATCH,
    SHARD_NAME,
    CheckpointFolder,
    reason_of,
)
from recipes.common.errors import UserError, may_pass
from recipes.common.folders import NO_FILE, is_special, names_in
from recipes.common.options import Options, option_applies
from recipes.common.process.threads import begin_in_threads

ShardCheck = Callable[[Path, list[dict[str, Any]]], None]
"""Checks the files that a sharded checkpoint names; raises as check_shards()."""


class BadCheckpointError(Exception):
    """The bytes of a file prove that it is not a complete checkpoint of this project; the message says why."""


def read_newest(
    folder: CheckpointFolder, set_aside: bool, check: ShardCheck | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest good checkpoint of a folder, or None if there has never been one.

    Bad ones are skipped with a warning. With `set_aside`, for a run that continues, the skipped ones are renamed
    to *.bad, and best.pt if it is one of them, so that they never count among the newest again. `check`: as for
    read_checkpoint().

    Raises:
        UserError: there are checkpoints, and none of them is good; or one cannot be read.
        OSError: the folder cannot be read.
    """
    paths, bad = folder.paths(), []
    for path in paths:
        try:
            content = read_checkpoint(path, check)
        except BadCheckpointError as error:
            print(f"warning: skipped {path}: {error}", file=sys.stderr, flush=True)
            bad.append(path)
            continue
        if set_aside and bad:
            _set_aside(folder, bad, content)
        return path, content
    names = names_in(folder.folder)
    best = folder.folder / "best.pt" if "best.pt" in names else None
    if best and not paths:
        with contextlib.suppress(BadCheckpointError):
            content = read_checkpoint(best, check)
            # The run was killed after this link to its first checkpoint was made, and before that had its name.
            if f"step-{content['position']['step']:09d}.tmp" in names:
                return best, content
    others = sorted(name for name in names if name.endswith((".pt", ".pt.bad")))
    if not others:
        return None
    what = f"no good checkpoint in {folder.folder}, only {', '.join(others[:3])}"
    if paths:
        what = f"none of the {len(paths)} checkpoints in {folder.folder} is good"
    if set_aside:
        other = f"try --start-from {best} under another --name, or " if best else ""
        fix = f"{other}begin again from step 0 with --overwrite and --resume none"
    else:
        fix = f"give {best}" if best else "give another run or checkpoint"
    raise UserError(f"{what}; {fix}")


def _set_aside(folder: CheckpointFolder, bad: list[Path], content: dict[str, Any]) -> None:
    """Rename bad checkpoints to *.bad; if best.pt is one of them, let the run choose it anew."""
    best = folder.folder / "best.pt"
    if best.name in names_in(folder.folder) and any(best.samefile(path) for path in bad):
        print(f"warning: set aside {best}, too; the next evaluation chooses it anew", file=sys.stderr, flush=True)
        content["position"]["best_score"] = -math.inf
        bad = [best, *bad]
    for path in bad:
        path.rename(path.with_name(f"{path.name}.bad"))


def read_checkpoint(path: Path, check: ShardCheck | None = None) -> dict[str, Any]:
    """Return a checkpoint's content with its tensors on the CPU; a sharded one has references in their place.

    `check` checks the shard files (default: this process does).

    Raises:
        BadCheckpointError: the file is cut, damaged (a CRC-32 covers every byte) or not of this project.
        UserError: the file cannot be read now (an I/O error, no memory), which does not prove that it is bad.
    """
    if is_special(path):
        raise BadCheckpointError(NO_FILE)
    # At the same time, as both wait for the disk. A daemon thread in torch's C++ code would abort Python's end.
    [checking] = begin_in_threads([partial(_check_bytes, path)], 1)
    content = failure = None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        failure = error
    try:
        checking.result()  # first: a wrong checksum is the reason for whatever torch has raised
        if failure:
            raise failure
    except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: torch's own allocator and reader
        raise _read_error(path, error) from error
    except BadCheckpointError:
        if is_weights_alone(content):
            raise BadCheckpointError("it holds only weights, as make export writes them, and no step") from None
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


def is_weights_alone(content: Any) -> bool:
    """Return whether a file's content is a model's state dict, and no checkpoint."""
    return isinstance(content, dict) and all(isinstance(value, torch.Tensor) for value in content.values())


def check_shards(path: Path, files: list[dict[str, Any]]) -> None:
    """Check every byte of the shard files that a checkpoint names, some files at a time; none stays in memory.

    Raises:
        BadCheckpointError: one is missing, cut or damaged.
        UserError: one cannot be read now.
    """

    def check(entry: dict[str, Any]) -> None:
        name = entry["name"]
        if not SHARD_NAME.fullmatch(name):
            raise BadCheckpointError(f"it names {name!r}, which is not a shard file")
        try:
            if is_special(path.with_name(name)):
                raise BadCheckpointError(f"its shard file {name} is none: {NO_FILE}")
            with open(path.with_name(name), "rb") as file:
                is_whole = os.fstat(file.fileno()).st_size == entry["size"]
                checksum, _ = checksum_of(file, entry["size"] if is_whole else 0)
        except FileNotFoundError:
            raise BadCheckpointError(f"its shard file {name} is missing") from None
        except OSError as error:
            raise _read_error(error.filename, error) from error
        if not is_whole or checksum != entry["crc32"]:
            raise BadCheckpointError(f"its shard file {name} is truncated or damaged (wrong checksum)")

    checks = begin_in_threads([partial(check, entry) for entry in files], 4)
    try:
        for done in checks:
            done.result()
    finally:
        for done in checks:
            done.cancel()


def _read_error(path: Path, error: BaseException) -> UserError:
    what = f"cannot read {path}: {reason_of(error)}; nothing was changed: fix this, then resume again"
    return UserError(what, is_passing=may_pass(error))


def _check_bytes(path: Path) -> None:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size - CHECKSUM_TRAILER.size
        checksum, count = checksum_of(file, size)
        if count < size:
            raise OSError(errno.EIO, "it ended before its length while it was read", str(path))
        if file.read() != CHECKSUM_TRAILER.pack(CHECKSUM_MARK, checksum):
            what = "truncated, damaged, or not a checkpoint of this project"
            raise BadCheckpointError(f"{what} (its checksum does not match)")


def checksum_of(file: BinaryIO, size: int) -> tuple[int, int]:
    """Return the CRC-32 of a file's next `size` bytes, and how many there were: fewer if the file ends before."""
    buffer, checksum, count = memoryview(bytearray(2**20)), 0, 0  # reused: new memory costs more than the sum
    while count < size and (read := file.readinto(buffer[: min(size - count, len(buffer))])):  # type: ignore[attr-defined]
        checksum = isal_zlib.crc32(buffer[:read], checksum)
        count += read
    return checksum, count


def check_options(args: Options, content: dict[str, Any], path: Path) -> None:
    """Raise UserError, with the first option that differs, if a checkpoint's options do not match (MUST_MATCH).

    An option that is missing there is newer than the checkpoint, whose run had what is now its default.
    """
    defaults = {field.name: field.default for field in fields(Options) if field.name in MUST_MATCH}
    for name, value in {**defaults, **content["options"]}.items():
        flag = f"--{name.replace('_', '-')}"
        if not hasattr(args, name):
            what = f"{path} was written with {flag} {value}, which this version does not support"
            raise UserError(f"{what}; resume with the version that wrote it")
        own = getattr(args, name)
        if own != value and option_applies(name, args.data):
            what = f"{path} was written with {flag} {value}, this run has {flag} {own}"
            raise UserError(f"{what}; give the same, or start a new run from step 0")
