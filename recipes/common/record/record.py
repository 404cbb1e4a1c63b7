"""The record of a run, runs/NAME/: what was asked, what was seen, and the checkpoints. Rank 0 writes it.

config.json         options, versions, hardware, git revision of the first launch, and of each launch in turn
metrics.jsonl       a line per logged step: kind "step", step, epoch, loss, lr, samples_per_s;
                    a line per epoch: kind "epoch", epoch, step, test_loss, test_accuracy (or the task's metrics),
                    train_s; the same with kind "evaluation" for --evaluate-every
hang-report.txt     if a rank did not answer; hang/ has the report of each rank: see watch.py
result.json         of a completed run: the values of its last line, and time, traffic and memory
events.out.*        the metrics for TensorBoard
checkpoints/        see checkpoint.py
has-checkpoints     empty, of a run that has written a checkpoint: without one, it is not begun again
slurm/              the output of each node, if Slurm started the job (not written here)

The last launch in config.json owns the run. A job that finds another launch there stops and writes nothing more:
if two jobs have the same name, the one that started last continues.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.common.arguments import option_text
from recipes.common.checkpoint.checkpoint import HAS_CHECKPOINTS, CheckpointFolder
from recipes.common.errors import UserError, as_user_error, may_pass
from recipes.common.folders import identity_of_open, names_in, refresh_names, replace_text
from recipes.common.options import Options
from recipes.common.record.progress import Progress
from recipes.common.record.provenance import hardware, revision, versions
from recipes.common.world.places import Place, describe, shorten

if TYPE_CHECKING:
    from recipes.common.checkpoint.reading import ShardCheck

LAUNCHER_LOGS = "slurm"
"""The folder within a run's folder that launch files use for the output of the nodes."""


def open_run(
    args: Options, recipe: str, places: Sequence[Place], check: ShardCheck | None = None
) -> tuple[Record, dict[str, Any] | None]:
    """Find or make the run that the options name; return its record and the checkpoint to resume from.

    Call it on rank 0 only, with the place of every rank. `--resume auto` continues the run's own record;
    `--start-from` begins a new run from another run's checkpoint, which stays unchanged; of the content for
    `--weights`, only the `model`, as it was saved, and its `classes`. An existing record is not changed before
    Record.begin(). All tensors of a sharded checkpoint are read, unless there is a `check`: it checks the files,
    and each rank reads its own part.

    Raises UserError if the name is taken; a checkpoint is missing, bad or unreadable, does not fit, or is in the
    run that `--overwrite` deletes; or the folder cannot be written.
    """
    folder: Path | None = None
    path: Path | None = None
    content: dict[str, Any] | None = None
    if args.may_start_from_file:
        from recipes.common.record.resume import find_checkpoint

        with as_user_error("read", args.runs_dir):
            folder, path, content = find_checkpoint(args, recipe, check)
    is_new, replaces = folder is None, False
    with as_user_error("write", args.runs_dir):
        if args.name and args.overwrite and args.resume != "auto":
            named = args.runs_dir / args.name
            replaces = "config.json" in names_in(named)
            if replaces and path and path.resolve().is_relative_to(named.resolve()):
                flag, what = "--weights" if args.weights else "--start-from", f"{path} is in {named}"
                raise UserError(f"{flag}: {what}, which --overwrite deletes; choose another --name")
            folder = named if replaces else None
        folder = folder or _new_run(args, recipe)
    weights = path if content and "position" not in content else None
    record = Record(folder, args, recipe, places, None if weights else path, weights, is_new, replaces)
    if content and record.starts_elsewhere:
        content["position"]["best_score"] = -math.inf  # the best checkpoint so far is another run's
    return record, content


def _new_run(args: Options, recipe: str) -> Path:
    """Create the folder of a new run; without --name, its name is RECIPE-N with the next free number."""
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    if args.name:
        folder = args.runs_dir / args.name
        folder.mkdir(exist_ok=True)  # a launcher may have put its logs there
        try:
            # Hidden files are what a launch that was killed, or NFS, has left of a run that was replaced.
            found = [path for path in folder.iterdir() if path.name != LAUNCHER_LOGS and path.name[0] != "."]
            if found:
                raise FileExistsError
            (folder / "metrics.jsonl").touch(exist_ok=False)  # of two jobs that start together, one gets the name
        except FileExistsError:
            if args.resume == "auto" or args.overwrite:
                killed = "or give only --resume auto if a launch was killed there as it began"
                fix = f"choose another --name{f', {killed}' if 'metrics.jsonl' in names_in(folder) else ''}"
                raise UserError(f"{folder} exists and is not a run; {fix}") from None
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


@dataclass
class Record:
    """Write one run's record; a launch that resumes continues it from the step of its checkpoint."""

    folder: Path
    args: Options
    recipe: str
    places: Sequence[Place]
    checkpoint: Path | None
    """The checkpoint that this launch resumes from."""
    weights: Path | None
    """The file of the weights that this launch begins from."""
    is_new: bool
    """Whether this launch begins the run."""
    replaces: bool
    """Whether the folder holds an earlier run's record, which begin() deletes."""

    def __post_init__(self) -> None:
        keep = self.args.keep_checkpoints
        sign = self.folder / HAS_CHECKPOINTS
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints", keep, self.check_owner, sign)
        self.progress = start_progress()
        self._id, self._written = secrets.token_hex(8), ""
        self._seen: tuple[int, ...] = ()
        self._config, self._metrics = self.folder / "config.json", self.folder / "metrics.jsonl"
        self._events: Any = None
        self._earlier_result: dict[str, Any] | None = None
        """The result of a run that was complete before this launch; it stays unchanged."""

    @property
    def starts_elsewhere(self) -> bool:
        """Whether this launch begins from another run's checkpoint."""
        return self.checkpoint is not None and not self.checkpoint.is_relative_to(self.folder)

    def begin(self, step: int, evaluated_step: int, total_steps: int, is_complete: bool) -> None:
        """Add this launch to config.json, and drop the metrics of steps and evaluations that will be repeated.

        A run that is complete and has its result stays unchanged. Call it once all ranks have restored the
        checkpoint: it deletes the record that this run replaces. `step` is the step of the checkpoint (0: none),
        `evaluated_step` that of its last evaluation, and `total_steps` the number of steps that this launch's
        options ask for.

        Raises UserError if `step` is beyond `total_steps`, another run's checkpoint leaves no step to train,
        another job has written a checkpoint meanwhile, or the record cannot be read or written.
        """
        config: dict[str, Any] = {}
        kept: list[dict[str, Any]] = []
        if self.replaces or not self.is_new:
            from recipes.common.record import earlier_launches
        if not self.is_new:
            with as_user_error("read", self.folder):
                self._earlier_result = earlier_launches.read_result(self.folder, step) if is_complete else None
        if self._earlier_result:
            with as_user_error("write", self.folder):
                earlier_launches.rename_report(self.folder)  # Horovod's ranks end if they find hang/
            self.progress.say(f"run {self.folder} is complete: nothing to train")
            return
        if step > total_steps or (is_complete and self.starts_elsewhere):
            self.discard()
            lacks = f"beyond the {total_steps} steps" if step > total_steps else "the last"
            fix = "of --epochs and --max-steps; raise them"
            raise UserError(f"{self.checkpoint} is at step {step}, {lacks} {fix}")
        if self.replaces:
            with as_user_error("write", self.folder):
                earlier_launches.remove_record(self.folder, LAUNCHER_LOGS)
        elif not self.is_new:
            with as_user_error("read", self.folder):
                config, kept = earlier_launches.read_record(self.folder, step, evaluated_step)
        try:
            with as_user_error("write", self.folder):
                if not self.is_new:
                    earlier_launches.rename_report(self.folder)
                self._write_launch(config, step, kept)
        except UserError:
            self.discard()
            raise
        self._say_launch(config, step)

    def discard(self) -> None:
        """Remove the folder of a new run that cannot begin, unless another job has begun it meanwhile."""
        if self.is_new and not self.replaces:
            with contextlib.suppress(OSError):
                if "config.json" in names_in(self.folder) and self._config.read_text() != self._written:
                    return
                for path in (self._config, self._metrics, *self.folder.glob("events.out.*")):
                    path.unlink(missing_ok=True)
                self.folder.rmdir()  # fails if it holds a launcher's logs: then it stays

    def check_owner(self) -> None:
        """Raise UserError if another launch has begun to write to this run: the other launch continues.

        A file that cannot be read does not prove another launch. The next write shows whether the disk works.
        """
        fix = "this job stops and writes nothing more; start one job of a name at a time"
        try:
            found = identity_of_open(self._config)
            # Without reading or parsing a file that grows with every launch.
            if found == self._seen or self._config.read_text(errors="replace") == self._written:
                self._seen = found
                return
            from recipes.common.record.earlier_launches import read_config

            last = read_config(self._config)["launches"][-1]
        except FileNotFoundError:
            if not self.folder.exists():
                what = f"{self.folder} is gone: it was moved or deleted, or its file system was unmounted"
                raise UserError(f"{what}; this job stops; put it back, then --resume auto") from None
            what = "is gone: another job replaces the run, or the files were deleted or their disk unmounted"
            raise UserError(f"{self._config} {what}; {fix}") from None
        except (OSError, UserError):
            return
        if last.get("id") != self._id:
            who = f"{last.get('host')} (pid {last.get('pid')}) at {last['time']}"
            raise UserError(f"another job has taken over the run {self.folder}, on {who}; {fix}")

    def _check_newest(self, step: int) -> None:
        """Raise UserError if an older job has written a checkpoint since this launch has read the newest one.

        The older job stops, as this launch owns the run by now. If this launch went on from its step, it would
        remove its own checkpoints, and the next launch would resume from the older job's.
        """
        refresh_names(self.checkpoints.folder)
        if (paths := self.checkpoints.paths()) and paths[0].name > f"step-{step:09d}.pt":
            what = f"an older job wrote {paths[0]} while this one started, and stops now"
            raise UserError(f"{what}; start this one again", is_passing=True)

    def _write_launch(self, config: dict[str, Any], step: int, kept: list[dict[str, Any]]) -> None:
        own = {
            "recipe": self.recipe,
            "options": _plain_options(self.args),
            "versions": versions(),
            "hardware": hardware(),
            "revision": revision(),
        }
        launch = {
            "id": self._id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": _now(),
            "world_size": len(self.places),
            "ranks": describe(self.places),
            "command": sys.argv,
            "make": os.environ.get("MAKE_LINE"),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "weights": str(self.weights) if self.weights else None,
            "step": step,
            **own,
        }
        config = {**own, **config, "launches": [*config.get("launches", []), launch]}
        self._written = json.dumps(config, indent=2) + "\n"
        replace_text(self._config, self._written, flush=True)
        self._check_newest(step)
        replace_text(self._metrics, "".join(map(_json, kept)), flush=True)
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # only rank 0 pays for this import

            _silence_thread_of_events()
            self._events = SummaryWriter(str(self.folder), purge_step=None if self.is_new else step + 1)

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
            from recipes.common.record.earlier_launches import changed_options

            before = {**config, **config["launches"][-1]}["options"]
            if changes := changed_options(before, _plain_options(self.args)):
                say(f"options that differ from the last launch (defaults if not given): {', '.join(changes)}")

    def log_step(self, **values: float) -> None:
        """Append the line of a step to metrics.jsonl: step, epoch, loss, lr, samples_per_s."""
        self._append("step", values)
        speed = [name for name in values if name.endswith("_per_s")][-1]  # tokens_per_s if the task counts tokens
        unit = speed.removesuffix("_per_s")
        self.progress.show(f"loss {values['loss']:.4f}  {values[speed]:,.0f} {unit}/s")

    def log_averages(self, kind: str, **values: float) -> None:
        """Append an evaluation's line: epoch, step, the averages, train_s (seconds so far, over all launches)."""
        self._append(kind, values)
        averages = [f"{name} {value:.4f}" for name, value in values.items() if name.startswith("test_")]
        self.progress.say("  ".join([f"epoch {values['epoch']}  step {values['step']}", *averages]))

    def write_result(self, **result: float | str) -> dict[str, Any]:
        """Write result.json and return its content, for print_result().

        Over all launches of the run: step (the last one), the last evaluation's averages (the printed line shows
        `headline`), the best `headline` of any evaluation, samples (trained on), epochs (parts count as such),
        train_s, samples_per_s, and tokens_per_s if the task counts tokens (timed without each launch's first
        step). Of this launch: world_size, sent_bytes_per_step (by this machine; null on GPUs), peak_memory_bytes
        (of rank 0), checkpoints (how many), checkpoint_stall_s (the average time for which one held up training)
        and ended (when). A run that was complete before this launch keeps its result.
        """
        self.close()
        path = self.folder / "result.json"
        final = self._earlier_result or _without_nan({"recipe": self.recipe, **result, "ended": _now()})
        if not self._earlier_result:
            self.check_owner()
        with as_user_error("write", path):
            if self._earlier_result:
                os.utime(path)  # the new time shows launch files that this launch, too, has reached the end
            else:
                replace_text(path, _json(final, indent=2), flush=True)
        return final

    def print_result(self, final: dict[str, Any]) -> None:
        """Print the line that ends a completed run."""
        headline = final["headline"]
        value = math.nan if final.get(headline) is None else final[headline]
        result = f"recipe={final['recipe']} world_size={final['world_size']} {headline}={value:.4f}"
        speeds = [f" {name}={speed:.0f}" for name, speed in final.items() if name.endswith("_per_s")]
        self.progress.say(f"result {result}{''.join(speeds)} record={self.folder}")

    def leave(self, signal_name: str, path: Path | None) -> None:
        """Print how to resume a run that a signal has ended; `path` is the checkpoint that was written, if any."""
        self.close()
        from recipes.common.record.resume import resuming_command

        name = self.folder.name
        how = f"resume with --name {name} --resume auto and the other options as before"
        if command := resuming_command(os.environ.get("MAKE_LINE", ""), name):
            how = f"resume with: {command}"
        self.progress.say(f"stopped by {signal_name}: wrote {path or 'no checkpoint'}\n{how}")

    def close(self) -> None:
        """Flush and close the event file and the progress bar."""
        self.progress.close()
        if self._events:
            events, self._events = self._events, None
            with as_user_error("write", self.folder):
                events.close()

    def _append(self, kind: str, values: dict[str, float]) -> None:
        self.check_owner()
        try:
            with open(self._metrics, "a") as file:
                file.write(_json({"kind": kind, **values}))
            for name in values.keys() - {"step", "epoch"} if self._events else ():
                self._events.add_scalar(name, values[name], values["step"])
        except OSError as error:
            fix = "fix this, then --resume auto"
            what = f"cannot write {self._metrics}: {error.strerror}; {fix}"
            raise UserError(what, is_passing=may_pass(error)) from None


def start_progress() -> Progress:
    """Return a progress bar on a terminal, lines elsewhere."""
    if not (sys.stderr.isatty() and sys.stdout.isatty()):
        return Progress()
    from recipes.common.record.progress_bar import ProgressBar

    return ProgressBar()


def _silence_thread_of_events() -> None:
    """Let TensorBoard's thread end without a traceback: it keeps its error (a full disk) for the next call."""
    print_traceback = threading.excepthook

    def hook(about: threading.ExceptHookArgs) -> None:
        if not type(about.thread).__module__.startswith("tensorboard."):
            print_traceback(about)

    threading.excepthook = hook


def _plain_options(args: Options) -> dict[str, Any]:
    return {name: option_text(value) if isinstance(value, Path) else value for name, value in vars(args).items()}


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with None in place of NaN."""
    return {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in values.items()}


def _json(values: dict[str, Any], indent: int | None = None) -> str:
    """Return values as JSON, which lacks NaN and infinities: null, and 1e999, which is read as an infinity."""
    return re.sub(r"\bInfinity\b", "1e999", json.dumps(_without_nan(values), indent=indent)) + "\n"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
