"""The record of a run, runs/NAME/: what was asked, what was seen, and the checkpoints. Rank 0 writes it.

config.json         options, versions, hardware, git revision of the first launch, and of each launch in turn
metrics.jsonl       a line per logged step: kind "step", step, epoch, loss, lr, samples_per_s;
                    a line per epoch: kind "epoch", epoch, step, test_loss, test_accuracy (or what the task has),
                    train_s
hang-report.txt     of a run in which a rank did not answer; with hang/, what each rank said: see watch.py
result.json         of a completed run: what its last line says, and time, traffic and memory
events.out.*        the same for TensorBoard
checkpoints/        see checkpoint.py
slurm/              what each node printed, where Slurm started it (not written here)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from recipes.common.checkpoint.checkpoint import (
    BadCheckpointError,
    CheckpointFolder,
    ShardCheck,
    check_options,
    names_in,
    read_checkpoint,
)
from recipes.common.errors import UserError, as_user_error
from recipes.common.options import Options
from recipes.common.record.facts import hardware, revision, versions
from recipes.common.record.progress import Progress
from recipes.common.watch.watch import rename_old_report
from recipes.common.world.places import Place, describe, shorten

LAUNCHER_LOGS = "slurm"
"""The folder within a run's in which launch files keep what the nodes print."""

NOT_COMPARED = ("config", "name", "overwrite", "resume", "runs_dir")
"""Options that differ between the launches of a run without meaning anything."""


def open_run(
    args: Options, recipe: str, places: Sequence[Place], check: ShardCheck | None = None
) -> tuple[Record, dict[str, Any] | None]:
    """Find or make the run that the options name; return its record and the checkpoint to resume from.

    Call it on rank 0 alone, with the place of every rank. `--resume auto` continues the run's own record;
    `--resume PATH` begins a new run from another run's checkpoint, which stays as it is. Nothing is written to
    an existing record before Record.begin(), which deletes the one that `--overwrite` replaces. Of a sharded
    checkpoint, all tensors are read; but none with `check`, which checks its files: each rank reads its own.

    Raises:
        UserError: the name is taken, a checkpoint is missing, bad, unreadable or does not fit, or in the run that
            `--overwrite` deletes, the disk refuses.
    """
    with as_user_error("read", args.runs_dir):
        folder, found = _find(args, recipe, check)
    if found:
        check_options(args, found[1], found[0])
        if not check:
            from recipes.common.checkpoint.shard_files import read_whole

            found = (found[0], read_whole(found[1]))
    is_new = folder is None
    with as_user_error("write", args.runs_dir):
        replaced = _replaced_run(args)
        if replaced and found and found[0].resolve().is_relative_to(replaced.resolve()):
            raise UserError(
                f"--resume: {found[0]} is in {replaced}, which --overwrite deletes; choose another --name"
            )
        folder = folder or replaced or _new_run(args, recipe)
    record = Record(folder, args, recipe, places, found[0] if found else None, is_new, replaced is not None)
    return record, found[1] if found else None


def _find(
    args: Options, recipe: str, check: ShardCheck | None
) -> tuple[Path | None, tuple[Path, dict[str, Any]] | None]:
    """Return the run to resume, and the checkpoint to resume from with its content; None: there is none."""
    if args.resume == "none":
        return None, None
    if args.resume != "auto":
        return None, read_path(Path(args.resume), check=check)
    folder = args.runs_dir / args.name if args.name else _newest_run(args.runs_dir, recipe)
    names = names_in(folder) if folder else set()
    if not folder or not names & {"config.json", "metrics.jsonl", "checkpoints"}:
        return None, None
    found = CheckpointFolder(folder / "checkpoints").read_newest(True, check)
    remedy = "choose another --name, or begin again from step 0 with --overwrite and --resume none"
    if not found and "result.json" in names:
        raise UserError(f"the run {folder} is complete, and its checkpoints are gone; {remedy}")
    if not found and "config.json" in names:
        # A run that began from another's checkpoint and has none of its own yet begins from there again.
        begun_from = _read_config(folder / "config.json")["launches"][-1]["checkpoint"]
        if begun_from and not Path(begun_from).exists():
            raise UserError(
                f"the run {folder} has no checkpoint, and {begun_from}, where it began, is gone; {remedy}"
            )
        found = read_path(Path(begun_from), check=check) if begun_from else None
    return folder, found


def _replaced_run(args: Options) -> Path | None:
    """Return the run that a new one is to replace; None: there is none."""
    if not args.name or not args.overwrite or args.resume == "auto":
        return None
    folder: Path = args.runs_dir / args.name
    return folder if "config.json" in names_in(folder) else None


def _new_run(args: Options, recipe: str) -> Path:
    """Make the folder of a new run; without --name, the next free number of the recipe."""
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
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue


def _empty(folder: Path) -> None:
    """Delete a run's record, but not the logs that a launcher is writing."""
    for path in folder.iterdir():
        if path.name == LAUNCHER_LOGS:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _newest_run(runs_dir: Path, recipe: str) -> Path | None:
    """Return the run that this recipe was launched in last, whatever its name."""
    launched = []
    for name in names_in(runs_dir):
        path = runs_dir / name / "config.json"
        try:
            config, time_ns = _read_config(path), path.stat().st_mtime_ns  # written at each launch
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (UserError, PermissionError) as error:
            print(f"warning: skipped a run in the search for the newest one: {error}", file=sys.stderr, flush=True)
            continue
        last = {**config, **config["launches"][-1]}
        if last["recipe"] == recipe:
            launched.append((datetime.fromisoformat(last["time"]), time_ns, path.parent))
    return max(launched)[2] if launched else None


def _read_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.json.

    Raises:
        UserError: the file is not what Record.begin() writes.
        OSError: it cannot be read.
    """
    text = path.read_text(errors="replace")
    with contextlib.suppress(ValueError):
        config = json.loads(text)
        if _is_config(config):
            return config
    raise UserError(f"{path} is damaged or not of this project; restore or remove it, or choose another --name")


def _is_config(content: Any) -> bool:
    """Return whether the content of a config.json has what a later launch reads."""
    try:
        last = {**content, **content["launches"][-1]}
        return (
            isinstance(last["recipe"], str)
            and isinstance(last["checkpoint"], str | None)
            and isinstance(last["options"], dict)
            and datetime.fromisoformat(last["time"]).tzinfo is not None
        )
    except (LookupError, TypeError, ValueError):
        return False


def read_path(
    path: Path, flag: str = "--resume", others: str = "auto, ", check: ShardCheck | None = None
) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint at a path, or the newest good one of the run at that path.

    `check`: as for read_checkpoint().

    Raises:
        UserError: there is none, or it is bad; it names the flag, and the others that it takes beside a path.
    """
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        raise UserError(f"{flag} {path}: no such file; give {others}a checkpoint, or a run's folder") from None
    if is_folder:
        folder = path / "checkpoints" if "checkpoints" in names_in(path) else path
        found = CheckpointFolder(folder).read_newest(False, check)
        if not found:
            raise UserError(f"{flag} {path}: no checkpoints in {folder}")
        return found
    try:
        return path, read_checkpoint(path, check)
    except BadCheckpointError as error:
        raise UserError(f"{flag} {path}: {error}; give another checkpoint or the run's folder") from None


class Record:
    """Write one run's record; continue it from the step of the checkpoint that a launch resumes from."""

    def __init__(
        self,
        folder: Path,
        args: Options,
        recipe: str,
        places: Sequence[Place],
        checkpoint: Path | None,
        is_new: bool,
        replaces: bool = False,
    ) -> None:
        self.folder, self.args, self.recipe = folder, args, recipe
        self.places, self.checkpoint, self.is_new = places, checkpoint, is_new
        self.replaces = replaces
        """The folder holds an earlier run's record, which begin() deletes."""
        self.checkpoints = CheckpointFolder(folder / "checkpoints", args.keep_checkpoints)
        self.progress = Progress()
        self._metrics = folder / "metrics.jsonl"
        self._events: Any = None
        self._earlier_result: dict[str, Any] | None = None
        """Of a run that was complete before this launch: that stays as it is."""

    def begin(self, step: int, total_steps: int, is_complete: bool) -> None:
        """Add this launch to config.json and drop the lines of steps that will be done again.

        A run that is complete and has its result stays as it is. Call it once all ranks have restored the
        checkpoint: it deletes the record that this run replaces.

        Args:
            step: the one that the checkpoint stands at, 0 without one.
            total_steps: those that this launch's options ask for.
            is_complete: whether there is nothing left to train or to evaluate.

        Raises:
            UserError: the checkpoint is beyond what is asked for, or the record cannot be read or written.
        """
        with as_user_error("read", self.folder):
            if is_complete and not self.is_new:
                self._earlier_result = self._read_result(step)
        if self._earlier_result:
            self.progress.say(f"run {self.folder} is complete: nothing to train")
            return
        if step > total_steps:
            self.discard()
            raise UserError(
                f"{self.checkpoint} is at step {step}, beyond the {total_steps} steps of --epochs and "
                "--max-steps; raise them"
            )
        path = self.folder / "config.json"
        with as_user_error("write", self.folder):
            if self.replaces:
                _empty(self.folder)
        with as_user_error("read", self.folder):
            config = _read_config(path) if path.name in names_in(self.folder) else {}
            kept = [line for line in _json_lines(self._metrics) if line["step"] <= step]
        with as_user_error("write", self.folder):
            self._write_launch(config, step, kept)
        self._say_launch(config, step)

    def discard(self) -> None:
        """Remove the folder of a new run that cannot begin."""
        if self.is_new and not self.replaces:
            with contextlib.suppress(OSError):
                self._metrics.unlink(missing_ok=True)
                self.folder.rmdir()  # stays where a launcher has its logs in it

    def _write_launch(self, config: dict[str, Any], step: int, kept: list[dict[str, Any]]) -> None:
        rename_old_report(self.folder)
        own = {
            "recipe": self.recipe,
            "options": {name: _plain(value) for name, value in self.args.as_dict().items()},
            "versions": versions(),
            "hardware": hardware(),
            "revision": revision(),
        }
        launch = {
            "time": _now(),
            "world_size": len(self.places),
            "ranks": describe(self.places),
            "command": sys.argv,
            "make": os.environ.get("MAKE_LINE"),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "step": step,
            **own,
        }
        config = {**own, **config, "launches": [*config.get("launches", []), launch]}
        _replace_text(self.folder / "config.json", json.dumps(config, indent=2) + "\n")
        _replace_text(self._metrics, "".join(json.dumps(line) + "\n" for line in kept))
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # rank 0 alone pays for this import

            self._events = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def _say_launch(self, config: dict[str, Any], step: int) -> None:
        """Print what this launch resumes from, and where it runs."""
        say = self.progress.say
        if self.args.resume == "auto" and self.is_new:
            sought = str(self.folder) if self.args.name else f"of {self.recipe} in {self.args.runs_dir}"
            say(f"nothing to resume (no run {sought} yet): starting a new run")
        say(f"run {self.folder}  world_size={len(self.places)}")
        for line in shorten(describe(self.places)):
            say(line)
        if self.checkpoint:
            say(f"resumed from {self.checkpoint} at step {step}")
        elif not self.is_new:
            say("no checkpoint yet: starting from step 0")
        if config:
            before = {**config, **config["launches"][-1]}["options"]
            changes = _changes(before, {name: _plain(value) for name, value in self.args.as_dict().items()})
            if changes:
                say(f"options that differ from the last launch (defaults if not given): {', '.join(changes)}")

    def _read_result(self, step: int) -> dict[str, Any] | None:
        """Return result.json; None where there is none, it was cut, or it is that of another step."""
        try:
            result = json.loads((self.folder / "result.json").read_text(errors="replace"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        is_whole = isinstance(result, dict) and result.keys() >= {"recipe", "world_size", "samples_per_s"}
        return result if is_whole and _headline(result) in result and result.get("step") == step else None

    def log_step(self, **values: float) -> None:
        """Append a logged step: step, epoch, loss, lr, samples_per_s."""
        self._append("step", values)
        speed = [name for name in values if name.endswith("_per_s")][-1]  # tokens_per_s, where a task counts them
        unit = speed.removesuffix("_per_s")
        self.progress.show(f"loss {values['loss']:.4f}  {values[speed]:,.0f} {unit}/s")

    def log_epoch(self, **values: float) -> None:
        """Append an epoch: epoch, step, the averages, train_s (seconds so far, of all launches)."""
        self._append("epoch", values)
        averages = [f"{name} {value:.4f}" for name, value in values.items() if name.startswith("test_")]
        self.progress.say("  ".join([f"epoch {values['epoch']}  step {values['step']}", *averages]))

    def write_result(self, **result: float | str) -> dict[str, Any]:
        """Write result.json, and return what is in it, which print_result() takes.

        Of the whole run, all launches together: step (the last), the last evaluation's averages, of which the line
        shows `headline`, the best `headline` of any evaluation, samples (trained on), train_s, samples_per_s, and
        tokens_per_s where a task counts them (timed without each launch's first step). Of this launch: world_size,
        sent_bytes_per_step (by this machine), peak_memory_bytes (of rank 0), checkpoints (their number),
        checkpoint_stall_s (for how long one held up training, on average) and ended (when). A run that was
        complete before keeps its result.
        """
        self.close()
        path = self.folder / "result.json"
        final: dict[str, Any] = self._earlier_result or {"recipe": self.recipe, **result, "ended": _now()}
        with as_user_error("write", path):
            if self._earlier_result:
                os.utime(path)  # launch files see by its time that this launch has reached the end, too
            else:
                _replace_text(path, json.dumps(final, indent=2) + "\n")
        return final

    def print_result(self, final: dict[str, Any]) -> None:
        """Print the line that ends a completed run."""
        headline = _headline(final)
        print(
            f"result recipe={final['recipe']} world_size={final['world_size']} "
            f"{headline}={final[headline]:.4f} "
            + " ".join(f"{name}={value:.0f}" for name, value in final.items() if name.endswith("_per_s"))
            + f" record={self.folder}",
            flush=True,
        )

    def leave(self, signal_name: str, path: Path) -> None:
        """Print how to resume a run that a signal has ended."""
        self.close()
        print(
            f"stopped by {signal_name}: wrote {path}\n"
            f"resume with --name {self.folder.name} --resume auto and the other options as before "
            f'(make run RECIPE={self.recipe} NAME={self.folder.name} ARGS="... --resume auto")',
            flush=True,
        )

    def close(self) -> None:
        """Flush and close the event file and the progress bar."""
        self.progress.close()
        if self._events:
            events, self._events = self._events, None
            with as_user_error("write", self.folder):
                events.close()

    def _append(self, kind: str, values: dict[str, float]) -> None:
        # JSON has no word for a loss that is not finite.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            with open(self._metrics, "a") as file:
                file.write(json.dumps({"kind": kind, **finite}) + "\n")
            for name in values.keys() - {"step", "epoch"} if self._events else ():
                self._events.add_scalar(name, values[name], values["step"])
        except OSError as error:
            raise UserError(
                f"cannot write {self._metrics}: {error.strerror}; fix this, then --resume auto"
            ) from None


def _headline(result: dict[str, Any]) -> str:
    """Return which of a result's values its line shows; results of earlier versions do not say."""
    return str(result.get("headline", "test_accuracy"))


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the options that two launches have in common and set differently."""

    def text(value: Any) -> Any:
        return {"True": "on", "False": "off", "None": "none"}.get(str(value), value)

    return [
        f"--{name.replace('_', '-')} {text(now[name])} (was {text(old)})"
        for name, old in before.items()
        if name in now and now[name] != old and name not in NOT_COMPARED
    ]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines that are whole: a kill may have cut the last, and a power cut any."""
    lines = []
    for text in path.read_text(errors="replace").splitlines() if path.name in names_in(path.parent) else []:
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict) and "step" in line:
                lines.append(line)
    return lines


def _replace_text(path: Path, text: str) -> None:
    """Write a file that is whole or as it was before, after a power cut too."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
