"""What a launch finds of earlier ones in the folder of its run, with --resume auto or --overwrite."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.folders import is_special, names_in

NOT_COMPARED = ("config", "name", "overwrite", "resume", "runs_dir", "start_from", "weights")
"""Options that may change between the launches of a run: changed_options() does not report them."""


def read_config(path: Path) -> dict[str, Any]:
    """Return a config.json's content; raises UserError if it is not one of ours, OSError if it cannot be read."""
    text = "" if is_special(path) else path.read_text(errors="replace")
    with contextlib.suppress(LookupError, TypeError, ValueError):
        config: dict[str, Any] = json.loads(text)
        last = {**config, **config["launches"][-1]}
        begun_from = last["checkpoint"], last.get("weights")  # older versions have no weights
        has_texts = isinstance(last["recipe"], str) and all(isinstance(path, str | None) for path in begun_from)
        has_zone = datetime.fromisoformat(last["time"]).tzinfo is not None
        if has_texts and has_zone and isinstance(last["options"], dict):
            return config
    raise UserError(f"{path} is damaged or not of this project; restore or remove it, or choose another --name")


def read_record(folder: Path, step: int, evaluated_step: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return config.json's content ({} if there is none), and the lines of metrics.jsonl up to a checkpoint.

    They are those of steps 1 to `step`, without an evaluation at `step` if `evaluated_step` is less: a job that is
    killed between the evaluation of a checkpoint's step and the next checkpoint repeats that evaluation.
    """
    path = folder / "config.json"
    config = read_config(path) if path.name in names_in(folder) else {}
    lines = [line for line in _json_lines(folder / "metrics.jsonl") if 0 < line["step"] <= step]
    if evaluated_step < step:
        lines = [line for line in lines if line["step"] < step or line.get("kind") not in ("epoch", "evaluation")]
    return config, lines


def read_result(folder: Path, step: int) -> dict[str, Any] | None:
    """Return the content of result.json; None if it is missing, incomplete or of another step."""
    try:
        result = json.loads((folder / "result.json").read_text(errors="replace"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    is_whole = isinstance(result, dict) and result.keys() >= {"recipe", "world_size", "samples_per_s", "headline"}
    return result if is_whole and result.get("step") == step and result["headline"] in result else None


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file: a kill may have cut the last line, and a power cut any line."""
    lines = []
    for text in path.read_text(errors="replace").splitlines() if path.name in names_in(path.parent) else []:
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict) and "step" in line:
                lines.append(line)
    return lines


def changed_options(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the options that differ between two launches, with both values; options of only one do not count."""

    def text(value: Any) -> Any:
        return {"True": "on", "False": "off", "None": "none"}.get(str(value), value)

    return [
        f"--{name.replace('_', '-')} {text(now[name])} (was {text(old)})"
        for name, old in before.items()
        if name in now and now[name] != old and name not in NOT_COMPARED
    ]


def rename_report(folder: Path) -> None:
    """Rename the hang report of an earlier launch of the run, and remove the ranks' parts of it in hang/."""
    shutil.rmtree(folder / "hang", ignore_errors=True)
    path = folder / "hang-report.txt"
    if path.exists():
        later = (folder / f"hang-report-{number}.txt" for number in itertools.count(1))
        path.rename(next(name for name in later if not name.exists()))


def remove_record(folder: Path, launcher_logs: str) -> None:
    """Delete a run's record, but not the logs that a launcher is writing.

    config.json goes last: a job that is killed meanwhile and starts again finds which launch it replaces.
    """
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
        if path.name == launcher_logs:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
