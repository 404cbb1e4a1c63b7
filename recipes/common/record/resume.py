"""What --resume continues: a run and its newest good checkpoint, or a checkpoint at a path."""

from __future__ import annotations

import shlex
import stat
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from recipes.common.checkpoint.checkpoint import CheckpointFolder, names_in, refresh_names
from recipes.common.checkpoint.reading import (
    BadCheckpointError,
    ShardCheck,
    check_options,
    read_checkpoint,
    read_newest,
)
from recipes.common.checkpoint.shard_files import read_whole
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.record.earlier_launches import read_config

Content = dict[str, Any]


def find_checkpoint(
    args: Options, recipe: str, check: ShardCheck | None
) -> tuple[Path | None, Path | None, Content | None]:
    """Return the run to continue, the checkpoint to resume from and its content; None for each if there is none.

    Raises:
        UserError: as open_run().
        OSError: something cannot be read.
    """
    folder: Path | None = None
    found: tuple[Path, Content] | None = None
    if args.resume == "auto":
        folder, found = _find_run(args, recipe, check)
    else:
        found = read_path(Path(args.resume), check=check)
    if not found:
        return folder, None, None
    path, content = found
    check_options(args, content, path)
    return folder, path, content if check else read_whole(content)


def _find_run(
    args: Options, recipe: str, check: ShardCheck | None
) -> tuple[Path | None, tuple[Path, Content] | None]:
    """Return the run of --resume auto, and its newest good checkpoint."""
    refresh_names(args.runs_dir)
    folder = args.runs_dir / args.name if args.name else _newest_run(args.runs_dir, recipe)
    if not folder:
        return None, None
    refresh_names(folder)
    names = names_in(folder)
    if not names & {"config.json", "metrics.jsonl", "checkpoints"}:
        return None, None
    refresh_names(folder / "checkpoints")
    found = read_newest(CheckpointFolder(folder / "checkpoints"), True, check)
    remedy = "choose another --name, or begin again from step 0 with --overwrite and --resume none"
    if not found and "result.json" in names:
        raise UserError(f"the run {folder} is complete, and its checkpoints are gone; {remedy}")
    if not found and "config.json" in names:
        # A run that began from another run's checkpoint and has none of its own yet begins from that one again.
        begun_from = read_config(folder / "config.json")["launches"][-1]["checkpoint"]
        if begun_from:
            try:
                Path(begun_from).stat()  # not exists(), which takes any error for "no" from Python 3.14 on
            except FileNotFoundError:
                what = f"the run {folder} has no checkpoint, and {begun_from}, where it began, is gone"
                raise UserError(f"{what}; {remedy}") from None
            found = read_path(Path(begun_from), check=check)
    return folder, found


def _newest_run(runs_dir: Path, recipe: str) -> Path | None:
    """Return the run that this recipe launched last, whatever its name; None if there is none."""
    launched = []
    for name in names_in(runs_dir):
        path = runs_dir / name / "config.json"
        try:
            config, time_ns = read_config(path), path.stat().st_mtime_ns  # each launch writes it
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (UserError, PermissionError) as error:
            print(f"warning: skipped a run in the search for the newest one: {error}", file=sys.stderr, flush=True)
            continue
        last = {**config, **config["launches"][-1]}
        if last["recipe"] == recipe:
            launched.append((datetime.fromisoformat(last["time"]), time_ns, path.parent))
    return max(launched)[2] if launched else None


def read_path(
    path: Path, flag: str = "--resume", others: str = "auto, ", check: ShardCheck | None = None
) -> tuple[Path, Content]:
    """Return the checkpoint at a path, or the newest good one of the run at that path.

    Raises UserError if there is none, or it is bad; the error names `flag` and `others`, its values besides a
    path. `check`: as for read_checkpoint().
    """
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        raise UserError(f"{flag} {path}: no such file; give {others}a checkpoint, or a run's folder") from None
    if is_folder:
        folder = path / "checkpoints" if "checkpoints" in names_in(path) else path
        found = read_newest(CheckpointFolder(folder), False, check)
        if not found:
            raise UserError(f"{flag} {path}: no checkpoints in {folder}; give another run or checkpoint")
        return found
    try:
        return path, read_checkpoint(path, check)
    except BadCheckpointError as error:
        raise UserError(f"{flag} {path}: {error}; give another checkpoint or the run's folder") from None


def resuming_command(line: str, name: str) -> str:
    """Return the command that resumes this run; "" unless `line`, which started it, is a `make run`."""
    make, _, text = line.partition(" run ")
    if make != "make":
        return ""
    given = dict(word.split("=", 1) for word in shlex.split(text))
    given |= {"NAME": name, "ARGS": f"{given.get('ARGS', '')} --resume auto".strip()}
    return " ".join(["make run", *(f"{variable}={shlex.quote(value)}" for variable, value in given.items())])
