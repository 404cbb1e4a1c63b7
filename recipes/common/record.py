"""The record of a run, runs/NAME/: what was asked, what was seen, and the checkpoints. Rank 0 writes it.

config.json         options, versions, hardware, git revision, and each launch of the run
metrics.jsonl       a line per logged step: step, epoch, loss, lr, samples_per_s;
                    a line per epoch: epoch, step, test_loss, test_accuracy, train_s
hang-report.txt     of a run in which a rank did not answer; with hang/, what each rank said: see watch.py
result.json         of a completed run: what its last line says, and time, traffic and memory
events.out.*        the same for TensorBoard
checkpoints/        see checkpoint.py
slurm/              what each node printed, where Slurm started it (not written here)
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recipes.common.checkpoint import BadCheckpointError, CheckpointFolder, check_options, read_checkpoint
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.places import Place, describe, shorten
from recipes.common.progress import Progress
from recipes.common.watch import put_away

LAUNCHER_LOGS = "slurm"
"""The folder within a run's in which launch files keep what the nodes print."""


def open_run(args: Options, recipe: str, places: Sequence[Place]) -> tuple[Record, dict[str, Any] | None]:
    """Make or continue the run that the options name; return its record and the checkpoint to go on from.

    Call it on rank 0 alone, with the place of every rank. `--resume auto` continues the run's own record;
    `--resume PATH` begins a new run from another run's checkpoint, which stays as it is.

    Raises:
        UserError: the name is taken, a checkpoint is missing, bad or does not fit, the disk refuses.
    """
    try:
        return _open_run(args, recipe, places)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or args.runs_dir}: {error.strerror or error}") from None


def _open_run(args: Options, recipe: str, places: Sequence[Place]) -> tuple[Record, dict[str, Any] | None]:
    found: tuple[Path, dict[str, Any]] | None = None
    continued = False
    if args.resume == "auto":
        folder = args.runs_dir / args.name if args.name else _newest_run(args.runs_dir, recipe)
        if folder and folder.exists():
            found = CheckpointFolder(folder / "checkpoints").read_newest(set_aside=True)
            continued = True
    elif args.resume != "none":
        found = _read_path(Path(args.resume))
    if found:
        check_options(args, found[1], found[0])
    if not continued:
        folder = _new_run(args, recipe)
    assert folder is not None  # _newest_run found it or _new_run made it
    record = Record(folder, args, recipe)
    record.begin(places, found[0] if found else None, found[1]["position"]["step"] if found else 0)
    return record, found[1] if found else None


def _new_run(args: Options, recipe: str) -> Path:
    """Make the folder of a new run; without --name, the next free number of the recipe."""
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    if args.name:
        folder = args.runs_dir / args.name
        if args.overwrite and (folder / "config.json").exists():
            _empty(folder)
        folder.mkdir(exist_ok=True)  # a launcher may have put its logs there
        try:
            if any(path.name != LAUNCHER_LOGS for path in folder.iterdir()):
                raise FileExistsError
            (folder / "metrics.jsonl").touch(exist_ok=False)  # of two jobs that start together, one gets the name
        except FileExistsError:
            mend = "add --resume auto to go on with it, --overwrite to replace it, or choose another --name"
            raise UserError(f"the run {folder} exists; {mend}") from None
        return folder
    number = max(_numbered_runs(args.runs_dir, recipe), default=0)
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


def _numbered_runs(runs_dir: Path, recipe: str) -> list[int]:
    names = (re.fullmatch(rf"{recipe}-(\d{{3,}})", path.name) for path in runs_dir.glob(f"{recipe}-*"))
    return [int(match[1]) for match in names if match]


def _newest_run(runs_dir: Path, recipe: str) -> Path | None:
    number = max(_numbered_runs(runs_dir, recipe), default=0)
    return runs_dir / f"{recipe}-{number:03d}" if number else None


def _read_path(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint at a path, or the newest good one of the run at that path."""
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = CheckpointFolder(folder).read_newest(set_aside=False)
        if not found:
            raise UserError(f"--resume {path}: no checkpoints in {folder}")
        return found
    if not path.exists():
        raise UserError(f"--resume {path}: no such file; give auto, a checkpoint, or a run's folder")
    try:
        return path, read_checkpoint(path)
    except BadCheckpointError as error:
        raise UserError(f"--resume {path}: {error}; give another checkpoint or the run's folder") from None


class Record:
    """Write one run's record; continue it from the step of the checkpoint that a launch goes on from."""

    def __init__(self, folder: Path, args: Options, recipe: str) -> None:
        self.folder, self.args, self.recipe = folder, args, recipe
        self.checkpoints = CheckpointFolder(folder / "checkpoints", args.keep_checkpoints)
        self.progress = Progress()
        self._metrics = folder / "metrics.jsonl"
        self._events: Any = None

    def begin(self, places: Sequence[Place], checkpoint: Path | None, step: int) -> None:
        """Write config.json and drop the lines of steps that will be done again."""
        put_away(self.folder)
        ranks = describe(places)
        launch = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "world_size": len(places),
            "ranks": ranks,
            "command": sys.argv,
            "checkpoint": str(checkpoint) if checkpoint else None,
            "step": step,
        }
        path = self.folder / "config.json"
        launches = json.loads(path.read_text())["launches"] if path.exists() else []
        config = {
            "recipe": self.recipe,
            "options": {name: _plain(value) for name, value in self.args.as_dict().items()},
            "versions": _versions(),
            "hardware": _hardware(),
            "revision": _revision(),
            "launches": [*launches, launch],
        }
        _replace_text(path, json.dumps(config, indent=2) + "\n")
        kept = [line for line in _json_lines(self._metrics) if line["step"] <= step]
        _replace_text(self._metrics, "".join(json.dumps(line) + "\n" for line in kept))
        self.progress.say(f"run {self.folder}  world_size={len(places)}")
        for line in shorten(ranks):
            self.progress.say(line)
        if checkpoint:
            self.progress.say(f"resumed from {checkpoint} at step {step}")
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # rank 0 alone pays for this import

            self._events = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def log_step(self, **values: float) -> None:
        """Append a logged step: step, epoch, loss, lr, samples_per_s."""
        self._append(values)
        self.progress.show(f"loss {values['loss']:.4f}  {values['samples_per_s']:,.0f} samples/s")

    def log_epoch(self, **values: float) -> None:
        """Append an epoch: epoch, step, test_loss, test_accuracy, train_s (seconds of this launch)."""
        self._append(values)
        self.progress.say(
            f"epoch {values['epoch']}  step {values['step']}  test_loss {values['test_loss']:.4f}  "
            f"test_accuracy {values['test_accuracy']:.4f}"
        )

    def finish(self, **result: float) -> None:
        """Write result.json and print the line that ends a completed run.

        The result is that of this launch: world_size, test_accuracy, samples_per_s, train_s,
        sent_bytes_per_step (by this machine), peak_memory_bytes (of rank 0), checkpoints (their number) and
        checkpoint_stall_s (for how long one held up training, on average).
        """
        self.close()
        text = json.dumps({"recipe": self.recipe, **result}, indent=2) + "\n"
        try:
            _replace_text(self.folder / "result.json", text)
        except OSError as error:
            raise UserError(f"cannot write {self.folder / 'result.json'}: {error.strerror}") from None
        print(
            f"result recipe={self.recipe} world_size={result['world_size']} "
            f"test_accuracy={result['test_accuracy']:.4f} samples_per_s={result['samples_per_s']:.0f}",
            flush=True,
        )

    def leave(self, signal_name: str, path: Path) -> None:
        """Say how to go on with a run that a signal has ended."""
        self.close()
        print(
            f"stopped by {signal_name}: wrote {path}\n"
            f"go on with --name {self.folder.name} --resume auto "
            f'(make run RECIPE={self.recipe} NAME={self.folder.name} ARGS="--resume auto")',
            flush=True,
        )

    def close(self) -> None:
        """Flush and close the event file and the progress bar."""
        self.progress.close()
        if self._events:
            self._events.close()
            self._events = None

    def _append(self, values: dict[str, float]) -> None:
        try:
            with open(self._metrics, "a") as file:
                # JSON has no word for a loss that is not finite.
                finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
                file.write(json.dumps(finite) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write {self._metrics}: {error.strerror}; mend this, then --resume auto"
            ) from None
        if self._events:
            for name, value in values.items():
                if name not in ("step", "epoch"):
                    self._events.add_scalar(name, value, values["step"])


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file that a kill may have cut within its last one."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}


def _hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
    }


def _revision() -> str | None:
    """Return the git revision of the code, with "-dirty" where tracked files differ from it.

    An image holds no repository: its Dockerfile says in SOURCE_REVISION what it was built from.
    """
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("SOURCE_REVISION")
