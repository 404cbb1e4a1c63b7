"""What a run starts from: a run and its newest good checkpoint, a checkpoint at a path, or only weights."""

from __future__ import annotations

import shlex
import stat
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from recipes.common.checkpoint.checkpoint import FORMAT, HAS_CHECKPOINTS, CheckpointFolder, reason_of
from recipes.common.checkpoint.reading import (
    BadCheckpointError,
    ShardCheck,
    check_options,
    read_checkpoint,
    read_newest,
)
from recipes.common.checkpoint.shard_files import read_whole
from recipes.common.errors import UserError, may_pass
from recipes.common.folders import check_file, names_in, refresh_names
from recipes.common.options import Options
from recipes.common.record.earlier_launches import read_config

Content = dict[str, Any]


def find_checkpoint(
    args: Options, recipe: str, check: ShardCheck | None
) -> tuple[Path | None, Path | None, Content | None]:
    """Return the run to continue, the checkpoint to resume from and its content; None for each if there is none.

    A run without a checkpoint gets the one of --start-from, or the file of --weights with what read_weights()
    returns.

    Raises:
        UserError: as open_run().
        OSError: something cannot be read.
    """
    folder: Path | None = None
    found: tuple[Path, Content] | None = None
    if args.resume == "auto":
        folder, found = _find_run(args, recipe, check)
    if not found and args.start_from:
        found = read_path(args.start_from, check=check)
    if not found and args.weights:
        found = read_weights(args.weights, check)
    if not found:
        return folder, None, None
    path, content = found
    if "position" in content:
        if args.evaluate:
            raise UserError(f"--evaluate: {folder} is a run that trains; choose another --name")
        check_options(args, content, path)
    return folder, path, content if check else read_whole(content)


def _find_run(
    args: Options, recipe: str, check: ShardCheck | None
) -> tuple[Path | None, tuple[Path, Content] | None]:
    """Return the run of --resume auto, and its newest good checkpoint, or else what it began from."""
    refresh_names(args.runs_dir)
    folder = args.runs_dir / args.name if args.name else _newest_run(args, recipe)
    if not folder:
        return None, None
    refresh_names(folder)
    names = names_in(folder)
    if not names & {"config.json", "metrics.jsonl", "checkpoints"}:
        return None, None
    refresh_names(folder / "checkpoints")
    found = read_newest(CheckpointFolder(folder / "checkpoints"), True, check)
    return folder, found or _find_beginning(args, folder, names, check)


def _find_beginning(
    args: Options, folder: Path, names: set[str], check: ShardCheck | None
) -> tuple[Path, Content] | None:
    """Return what a run without a checkpoint of its own begins from again; None if nothing, or what is given now.

    It is another run's checkpoint or, unless others are given, weights. Raises UserError if this is gone, or if
    the run has written a checkpoint.
    """
    path, what = folder / "checkpoints", ""
    last: dict[str, Any] = {"checkpoint": None, "options": {}}
    if "config.json" in names:
        config = read_config(folder / "config.json")
        last = {**config, **config["launches"][-1]}
        if _evaluates(last) != args.evaluate:
            kind = "trains" if args.evaluate else "only evaluates"
            raise UserError(f"{folder} is a run that {kind}; choose another --name")
    is_given = args.start_from or args.weights
    begun_from = last["checkpoint"] or (None if is_given else last.get("weights"))
    if path.name in names and not _exists(path):
        what = f"{path} is a link to {path.readlink()}, which does not exist"
    elif "result.json" in names and not args.evaluate:
        what = f"the run {folder} is complete, and its checkpoints are gone"
    elif HAS_CHECKPOINTS in names:
        what = f"the run {folder} has written checkpoints, and they are gone"
    elif begun_from and not _exists(Path(begun_from)):
        what = f"the run {folder} has no checkpoint, and {begun_from}, where it began, is gone"
    if what:
        fix = "put back what is gone, choose another --name, or begin again from step 0 with --overwrite"
        raise UserError(f"{what}; {fix} and --resume none")
    read = read_path if last["checkpoint"] else read_weights
    return read(Path(begun_from), check=check) if begun_from else None


def _exists(path: Path) -> bool:
    try:
        path.stat()  # not exists(), which takes any error for "no" from Python 3.14 on
    except FileNotFoundError:
        return False
    return True


def _evaluates(launch: dict[str, Any]) -> bool:
    return bool(launch["options"].get("evaluate"))  # older versions have no --evaluate


def _newest_run(args: Options, recipe: str) -> Path | None:
    """Return the run that this recipe launched last, whatever its name; None if there is none.

    It is one that only evaluates if this launch does.
    """
    launched = []
    for name in names_in(args.runs_dir):
        path = args.runs_dir / name / "config.json"
        try:
            config, time_ns = read_config(path), path.stat().st_mtime_ns  # each launch writes it
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (UserError, PermissionError) as error:
            print(f"warning: skipped a run in the search for the newest one: {error}", file=sys.stderr, flush=True)
            continue
        last = {**config, **config["launches"][-1]}
        if last["recipe"] == recipe and _evaluates(last) == args.evaluate:
            launched.append((datetime.fromisoformat(last["time"]), time_ns, path.parent))
    return max(launched)[2] if launched else None


def read_path(path: Path, flag: str = "--start-from", check: ShardCheck | None = None) -> tuple[Path, Content]:
    """Return the checkpoint at a path, or the newest good one of the run at that path.

    Raises UserError, which names `flag`, if there is none, or it is bad. `check`: as for read_checkpoint().
    """
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        raise UserError(f"{flag} {path}: no such file; give a checkpoint, or a run's folder") from None
    if is_folder:
        folder = _checkpoints_in(path)
        found = read_newest(CheckpointFolder(folder), False, check)
        if not found:
            raise UserError(f"{flag} {path}: no checkpoints in {folder}; give another run or checkpoint")
        return found
    try:
        return path, read_checkpoint(path, check)
    except BadCheckpointError as error:
        raise UserError(f"{flag} {path}: {error}; give another checkpoint or the run's folder") from None


def _checkpoints_in(folder: Path) -> Path:
    """Return the folder of checkpoints of a run, or the folder itself if it is none."""
    return folder / "checkpoints" if "checkpoints" in names_in(folder) else folder


def _published_in(path: Path) -> Path:
    """Return the file of the weights in a folder of Hugging Face's; the path itself if it is none."""
    try:
        names = names_in(path)
    except NotADirectoryError:
        return path
    files = [] if "checkpoints" in names else ["model.safetensors", "model.safetensors.index.json"]
    return next((path / name for name in files if name in names), path)


def read_weights(path: Path, check: ShardCheck | None) -> tuple[Path, Content]:
    """Return the file of the weights at a path, and as `model` of the content its state dict, on the CPU.

    Of a checkpoint, `classes` are the names of those that it was trained on, or None.

    The path is of a state dict, alone or in a dict as `model` or `state_dict`; of safetensors, their index, or the
    folder that Hugging Face's save_pretrained() writes; of a checkpoint; or of a run, of which the best checkpoint
    is read, else the newest good one. `check`: as for read_checkpoint().

    Raises:
        UserError: the file holds no weights, or more than weights; or as read_path().
        OSError: the file cannot be read.
    """
    files = "a file of torch.save(model.state_dict()), safetensors or a folder of them"
    fix = f"give {files}, a checkpoint, or a run's folder"
    content: Any = {"format": FORMAT}
    path = _published_in(path)
    try:
        check_file(path)
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            from recipes.common.checkpoint.safetensors_files import read_safetensors

            content = read_safetensors(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except IsADirectoryError:
        folder = _checkpoints_in(path)
        path = folder / "best.pt" if "best.pt" in names_in(folder) else path
    except UserError as error:
        raise UserError(f"--weights {error}") from None
    except FileNotFoundError:
        raise UserError(f"--weights {path}: no such file; {fix}") from None
    except OSError:
        raise
    except (MemoryError, RuntimeError) as error:  # torch's own allocator and reader
        what = f"cannot read --weights {path}: {reason_of(error)}; {fix}"
        raise UserError(what, is_passing=may_pass(error)) from None
    except Exception:  # pickle and torch raise a dozen kinds
        what = "it is not a file of torch.save(), or holds more than tensors and plain values"
        raise UserError(f"--weights {path}: {what}; {fix}") from None
    if isinstance(content, dict) and content.get("format") == FORMAT:
        path, content = read_path(path, "--weights", check)  # it checks every byte
        model = read_whole({name: content.get(name) for name in ("model", "shards")})["model"]
        return path, {"model": model, "classes": content.get("data", {}).get("classes")}
    for name in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    is_state = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    if not is_state or not any(map(torch.is_tensor, content.values())):
        raise UserError(f"--weights {path}: it holds no state dict; {fix}")
    return path, {"model": content}


def resuming_command(line: str, name: str) -> str:
    """Return the command that resumes this run; "" unless `line`, which started it, is a `make run`."""
    make, _, text = line.partition(" run ")
    if make != "make":
        return ""
    given = dict(word.split("=", 1) for word in shlex.split(text))
    given |= {"NAME": name, "ARGS": f"{given.get('ARGS', '')} --resume auto".strip()}
    return " ".join(["make run", *(f"{variable}={shlex.quote(value)}" for variable, value in given.items())])
