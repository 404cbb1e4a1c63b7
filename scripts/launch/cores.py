"""Print how many cores this node may use: the least of all limits.

    python -m scripts.launch.cores

The limits are CPU affinity (cpusets, taskset, Slurm's binding), the quotas of the process's cgroups (docker run
--cpus, limits in Kubernetes), SLURM_CPUS_PER_TASK, and CPU_REQUEST. A pod that requests cores without a limit sees
the whole machine, so the manifests pass the request on as CPU_REQUEST through the downward API.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def count_cores(cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the smallest of the limits, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = [os.environ.get(name, "") for name in ("SLURM_CPUS_PER_TASK", "CPU_REQUEST")]
    numbers = [int(text) for text in given if text.isascii() and text.isdigit()]
    return max(1, min([affinity, *numbers, *(int(quota) for quota in quotas(cgroup, root))]))


def quotas(cgroup: Path, root: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's cgroups and their ancestors; `cgroup` is /proc/self/cgroup."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers  # version 2 names no controllers
        folder = base / path.lstrip("/")  # in a container, its own cgroup may be the root, whatever the path says
        for place in (folder, *folder.parents):
            if place.is_relative_to(base):
                yield from quota_of(place)


def quota_of(folder: Path) -> Iterator[float]:
    """Yield the quota of one cgroup in cores, if it has one: cpu.max, or cpu.cfs_quota_us in version 1."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return
    if quota not in ("max", "-1"):
        yield int(quota) / int(period)


if __name__ == "__main__":
    print(count_cores())
