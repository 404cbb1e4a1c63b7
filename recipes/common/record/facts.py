"""What a run or a measurement was made with: the machine, versions of software, the revision of the code."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


def versions() -> dict[str, str | None]:
    """Return the versions of what a run is made of; None for what this machine lacks."""
    import torch  # revision() is for programs that have none, too

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

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": _first_line(Path("/proc/cpuinfo"), r"model name\s*: (.+)"),
        "cpus": os.cpu_count(),
        "gpus": gpus,
    }


def _first_line(path: Path, pattern: str) -> str | None:
    """Return the part in parentheses of the first line that begins with a pattern; None where there is none."""
    try:
        match = re.search(rf"^{pattern}$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def revision() -> str | None:
    """Return the git revision of the code, with "-dirty" where tracked files differ from it.

    An image holds no repository: its Dockerfile says in SOURCE_REVISION what it was built from.
    """
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("SOURCE_REVISION")
