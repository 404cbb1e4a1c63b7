"""What a run or a measurement was made with: the machine, versions of software, the revision of the code."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


def versions() -> dict[str, str | None]:
    """Return the versions of a run's software; None for what this machine lacks."""
    import torch  # here, as programs without torch use revision()

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and hasattr(torch._C, "_nccl_version") else ()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": next((found.version for found in distributions(name="torchvision")), None),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) or None,
        "driver": _first_line(Path("/sys/module/nvidia/version"), r"(.+)"),
    }


def hardware() -> dict[str, Any]:
    """Return this machine's system, processor and GPUs."""
    import torch

    # torch counts GPUs also with a driver that is too old for it, and then knows no names.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(i) for i in range(count)]
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": _first_line(Path("/proc/cpuinfo"), r"model name\s*: (.+)"),
        "cpus": os.cpu_count(),
        "gpus": gpus,
    }


def _first_line(path: Path, pattern: str) -> str | None:
    """Return the group that a pattern captures in the first line that matches it; None if none does."""
    try:
        match = re.search(rf"^{pattern}$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def revision(file: Path | None = None, ignored: Sequence[Path] = (), digits: int = 40) -> str | None:
    """Return the git revision of the code, with "-dirty" if tracked files differ from it; None if unknown.

    `file` is one that the code's own repository tracks (default: this one): an archive may be unpacked within
    another repository. Files and folders in `ignored` may differ. A container image holds no repository: its
    Dockerfile sets SOURCE_REVISION.
    """
    tracked = file or Path(__file__)

    def ask_git(*words: str) -> str:
        command = ["git", "-C", str(tracked.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        ask_git("ls-files", "--error-unmatch", tracked.name)
        commit = ask_git("describe", "--always", f"--abbrev={digits}")
        changed = ask_git("diff", "--name-only", "HEAD", "--", ":/", *(f":(exclude){path}" for path in ignored))
        return f"{commit}-dirty" if changed else commit
    except (OSError, subprocess.SubprocessError):
        source = os.environ.get("SOURCE_REVISION")
        return source and re.sub(rf"^([0-9a-f]{{{digits}}})[0-9a-f]+", r"\1", source)
