"""Read the records that runs leave, and say where and with what a measurement was made."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any


def read_metrics(run: Path, is_running: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl; of a running run the complete lines so far, if any."""
    path = run / "metrics.jsonl"
    text = "" if is_running and not path.exists() else path.read_text()
    whole = text.rpartition("\n")[0] if is_running else text
    return [json.loads(line) for line in whole.splitlines()]


def last_step(run: Path) -> int:
    """Return the step of the newest complete line of a running run's metrics.jsonl, or 0 if there is none."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 1000))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError):  # the file does not exist yet, or is being replaced
        return 0


def read_losses(run: Path) -> dict[int, float]:
    """Return the training loss of each logged step of a run that is finite: a skipped step's may be not."""
    losses = {row["step"]: row["loss"] for row in read_metrics(run) if row.get("loss") is not None}
    return {step: loss for step, loss in losses.items() if math.isfinite(loss)}


def differences(losses: dict[int, float], reference: dict[int, float]) -> dict[int, float]:
    """Return the relative difference of two loss curves at each step of both; infinite if the reference is 0."""
    both = [(step, abs(losses[step] - loss), abs(loss)) for step, loss in reference.items() if step in losses]
    return {step: apart and (apart / size if size else math.inf) for step, apart, size in both}


def measured_on(*packages: str) -> dict[str, Any]:
    """Return the time, this machine, and the versions of Python and of those given packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "versions": versions,
    }
