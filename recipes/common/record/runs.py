"""The run that --name, --overwrite and --resume mean: find or make its folder."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.common.checkpoint.checkpoint import names_in
from recipes.common.errors import UserError, as_user_error
from recipes.common.options import Options
from recipes.common.record.record import LAUNCHER_LOGS, Record
from recipes.common.world.places import Place

if TYPE_CHECKING:
    from recipes.common.checkpoint.reading import ShardCheck


def open_run(
    args: Options, recipe: str, places: Sequence[Place], check: ShardCheck | None = None
) -> tuple[Record, dict[str, Any] | None]:
    """Find or make the run that the options name; return its record and the checkpoint to resume from.

    Call it on rank 0 only, with the place of every rank. `--resume auto` continues the run's own record;
    `--resume PATH` begins a new run from another run's checkpoint, which stays unchanged. Nothing is written to
    an existing record before Record.begin(), which deletes the one that `--overwrite` replaces. All tensors of a
    sharded checkpoint are read, unless there is a `check`: it checks the files, and each rank reads its own part.

    Raises UserError if the name is taken; a checkpoint is missing, bad or unreadable, does not fit, or is in the
    run that `--overwrite` deletes; or the folder cannot be written.
    """
    folder: Path | None = None
    path: Path | None = None
    content: dict[str, Any] | None = None
    if args.resume != "none":
        from recipes.common.record.resume import find_checkpoint

        with as_user_error("read", args.runs_dir):
            folder, path, content = find_checkpoint(args, recipe, check)
    is_new, replaces = folder is None, False
    with as_user_error("write", args.runs_dir):
        if args.name and args.overwrite and args.resume != "auto":
            named = args.runs_dir / args.name
            replaces = "config.json" in names_in(named)
            if replaces and path and path.resolve().is_relative_to(named.resolve()):
                fix = "choose another --name"
                raise UserError(f"--resume: {path} is in {named}, which --overwrite deletes; {fix}")
            folder = named if replaces else None
        folder = folder or _new_run(args, recipe)
    return Record(folder, args, recipe, places, path, is_new, replaces), content


def _new_run(args: Options, recipe: str) -> Path:
    """Create the folder of a new run; without --name, its name is RECIPE-N with the next free number."""
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    if args.name:
        folder = args.runs_dir / args.name
        folder.mkdir(exist_ok=True)  # a launcher may have put its logs there
        try:
            if any(path.name != LAUNCHER_LOGS for path in folder.iterdir()):
                raise FileExistsError
            (folder / "metrics.jsonl").touch(exist_ok=False)  # of two jobs that start together, one gets the name
        except FileExistsError:
            if args.resume == "auto" or args.overwrite:
                raise UserError(f"{folder} exists and is not a run; choose another --name") from None
            remedy = "add --resume auto to resume it, --overwrite to replace it, or choose another --name"
            raise UserError(f"the run {folder} exists; {remedy}") from None
        return folder
    numbers = (re.fullmatch(rf"{recipe}-(\d{{3,}})", name) for name in names_in(args.runs_dir))
    number = max((int(match[1]) for match in numbers if match), default=0)
    while True:  # mkdir is atomic: of two jobs that start together, one takes the next number
        number += 1
        folder = args.runs_dir / f"{recipe}-{number:03d}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
