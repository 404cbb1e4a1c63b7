"""The facts of one node, found without any other node and without importing torch.

`gather` returns plain values that can be sent as JSON. A fact that cannot be determined is None, and its error is
under "errors", where the rules find it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.process.threads import begin_in_threads, call_within
from recipes.common.record.provenance import revision
from scripts.doctor import kernel_log
from scripts.launch.command import ROOT
from scripts.launch.cores import count_cores
from scripts.launch.interface import interface_addresses, interface_to, local_end, resolve

TORCH_TIMEOUT_S = 60.0
"""Importing torch from a slow shared file system can take most of it."""

PART_TIMEOUT_S = 20.0

QUICK_S = 6.0
"""Time limit for all parts together with --quick on one node: a health check has to end within 10 s."""

COMMAND_TIMEOUT_S = 15.0
"""Time limit of a call of nvidia-smi, which hangs if the driver is stuck."""

VARIABLES = ("NNODES", "NPROC_PER_NODE", "FABRIC", "CUDA_VISIBLE_DEVICES")
"""The variables by which rules judge what a node has."""

Facts = dict[str, Any]


def gather(master_addr: str, name_timeout_s: int, runs_dir: Path, is_quick: bool, within_s: float = inf) -> Facts:
    """Return this node's facts; each part has a time limit, which is at most within_s."""
    parts: dict[str, Callable[[], Any]] = {
        "names": lambda: sorted({socket.gethostname(), socket.getfqdn()} - {"localhost"}),
        "network": lambda: network(master_addr, name_timeout_s),
        "limits": limits,
        "disk": lambda: disks(runs_dir),
        "rdma": lambda: sorted(path.name for path in infiniband().glob("*")),  # they need locked memory
        "rdma_gbit_s": rdma_rates,
        "kernel_log": kernel_log.read,
        "revision": revision,
        "code": code_digest,
        "gpus": lambda: gpus(min(COMMAND_TIMEOUT_S, within_s / 2)),
    }
    facts: Facts = {
        "errors": {},
        # In Kubernetes a node is a pod: also name the machine that it runs on, which is what has to be fixed.
        "host": socket.gethostname() + (f" on {os.environ['NODE_NAME']}" if os.environ.get("NODE_NAME") else ""),
        "machine": machine_id(),
        "python": platform.python_version(),
        "cores": count_cores(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }

    def find_out(name: str) -> None:
        bound = name_timeout_s + PART_TIMEOUT_S if name == "network" else PART_TIMEOUT_S
        try:
            facts[name] = call_within(parts[name], min(bound, within_s))
        except (OSError, ValueError, LookupError, ImportError, subprocess.SubprocessError) as error:
            facts[name], facts["errors"][name] = None, one_line(error)

    # In parallel: a file system, a driver or a name server may hang, and must not delay the other parts.
    for done in begin_in_threads([partial(find_out, name) for name in parts], len(parts)):
        done.result()
    facts["names"] = facts["names"] or [socket.gethostname()]
    facts["torch"] = None if is_quick else torch_facts()
    return facts


def one_line(error: BaseException | str) -> str:
    """Return an error's text without line breaks; name its type if it is a LookupError or has no text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__} {text}".strip() if isinstance(error, LookupError) or not text else text


def machine_id() -> str:
    """Return an identifier that two nodes share only if they share kernel and network, and so have no link."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def network(master_addr: str, name_timeout_s: int) -> Facts:
    """Return the interface for gloo, its address and MTU, and the addresses of all interfaces.

    It is GLOO_SOCKET_IFNAME's, or the one on the route to MASTER_ADDR. NCCL_SOCKET_IFNAME is only checked. Raises
    UserError if MASTER_ADDR is unknown or has no route, or a variable names an interface that does not exist.
    """
    import psutil

    family, target = resolve(master_addr, name_timeout_s)
    chosen = interface_to(master_addr)
    interfaces = interface_addresses(family)
    gloo, nccl = (os.environ.get(f"{library}_SOCKET_IFNAME", "") for library in ("GLOO", "NCCL"))
    whole_names = [name for name in gloo.split(",") if name in interfaces]
    matches = [name for name in interfaces if interface_matches(nccl, name)]
    for library, wanted, known in (("GLOO", gloo, whole_names), ("NCCL", nccl, matches)):
        if wanted and not known:
            others = f"it has {', '.join(interfaces)}"
            raise UserError(f"{library}_SOCKET_IFNAME={wanted} is not an interface of this node ({others})")
    if gloo:
        chosen = whole_names[0]
    addresses = interfaces[chosen]
    if not addresses:
        raise UserError(f"{chosen} has no address of the kind that {master_addr} has ({target[0]})")
    # An interface may have several addresses: take the one that the kernel would send from.
    own = local_end(master_addr, family, target)
    state = psutil.net_if_stats()[chosen]
    return {
        "interface": chosen,
        "address": own if own in addresses else addresses[0],
        "mtu": state.mtu,
        "is_up": state.isup,
        "addresses": sorted(itertools.chain(*interface_addresses(socket.AF_INET, socket.AF_INET6).values())),
    }


def listening_address(master_addr: str, name_timeout_s: int) -> str:
    """Return node 0's address for the others, whatever interface the variables name; raises UserError."""
    family, target = resolve(master_addr, name_timeout_s)
    interface = interface_to(master_addr)
    addresses = interface_addresses(family).get(interface, [])
    # MASTER_ADDR's address is on that interface, unless the name leads to the loopback here (as Debian sets up a
    # host's own name) or to the address of a service, which is not this node's.
    return target[0] if target[0] in addresses or interface == "lo" or not addresses else addresses[0]


def interface_matches(wanted: str, name: str) -> bool:
    """Return whether NCCL's list of interfaces has a name: prefixes, exact names after =, all others after ^."""
    excludes, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    names = [part for part in wanted.removeprefix("=").split(",") if part]
    is_listed = name in names if wanted.startswith("=") else any(name.startswith(prefix) for prefix in names)
    return is_listed != excludes


def limits() -> Facts:
    """Return this process's limits of open files, now and at most, and of locked memory; -1 is unlimited."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {"open_files": files, "most_files": most_files, "locked_bytes": locked}


def disks(runs_dir: Path) -> Facts:
    """Return the size of /dev/shm, and the free space of the runs folder (or its closest parent) and of TMPDIR."""
    existing = next(path for path in (runs_dir.absolute(), *runs_dir.absolute().parents) if path.exists())
    shm = Path("/dev/shm")
    return {
        "shm_bytes": shutil.disk_usage(shm).total if shm.exists() else None,
        "runs": str(runs_dir.absolute()),
        "runs_free_bytes": shutil.disk_usage(existing).free,
        "tmp": tempfile.gettempdir(),
        "tmp_free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
    }


def infiniband() -> Path:
    """Return the folder of RDMA devices (SYSFS replaces /sys, as in scripts/launch/fabric.sh)."""
    return Path(os.environ.get("SYSFS", "/sys")) / "class/infiniband"


def rdma_rates() -> dict[str, float]:
    """Return the Gbit/s of each device's active port, which /sys shows as "400 Gb/sec (4X NDR)"."""
    ports = [port for port in infiniband().glob("*/ports/*") if "ACTIVE" in (port / "state").read_text()]
    return {port.parts[-3]: float((port / "rate").read_text().split()[0]) for port in ports}


def code_digest() -> str:
    """Return a digest of the code, which distinguishes copies even if git does not."""
    digest = hashlib.sha256()
    for folder in ("recipes", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


GPU_FIELDS = ("index", "name", "driver_version", "memory.total", "memory.used", "temperature.gpu")
ECC_FIELD = "ecc.errors.uncorrected.volatile.total"
HOT_FIELDS = {
    "clocks_throttle_reasons.hw_slowdown": "hardware slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown": "too hot (hardware)",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "power brake",
    "clocks_throttle_reasons.sw_thermal_slowdown": "too hot (driver)",
}
GPU_HEALTH = (ECC_FIELD, *HOT_FIELDS)


def gpus(timeout_s: float = COMMAND_TIMEOUT_S) -> list[Facts] | None:
    """Return what two or more calls of nvidia-smi say about each GPU, or None if there is no nvidia-smi.

    Raises ValueError if it fails, or a GPU disappears between two calls; TimeoutError if a call hangs.
    """
    if not shutil.which("nvidia-smi"):
        return None
    found = query_gpus(GPU_FIELDS, timeout_s)
    # A driver that does not know one of the fields rejects the query. "Throttle" became "event" in driver 535.
    renamed = tuple(field.replace("_throttle_", "_event_") for field in GPU_HEALTH)
    for asked in (GPU_HEALTH, renamed, (ECC_FIELD,)):
        with contextlib.suppress(ValueError):
            health = query_gpus(asked, timeout_s)
            break
    else:
        return found
    if len(health) != len(found):
        raise ValueError(f"nvidia-smi listed {len(found)} GPUs, and {len(health)} a moment later")
    states = (dict(zip(GPU_HEALTH, state.values(), strict=False)) for state in health)
    return [{**gpu, **state} for gpu, state in zip(found, states, strict=True)]


def query_gpus(fields: tuple[str, ...], timeout_s: float) -> list[Facts]:
    """Return a dict for each GPU; raises ValueError with nvidia-smi's complaint, TimeoutError if it hangs."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"nvidia-smi did not end within {timeout_s:.0f} s") from None
    if done.returncode:
        raise ValueError(f"nvidia-smi ended with status {done.returncode}: {done.stdout} {done.stderr}")
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if odd := [row for row in rows if len(row) != len(fields)]:
        raise ValueError(f"nvidia-smi says {', '.join(odd[0])}")
    return [dict(zip(fields, row, strict=True)) for row in rows]


def torch_facts() -> Facts:
    """Return what torch finds in a new process, or {"error": ...} if that fails or does not end."""
    command = [sys.executable, "-m", "scripts.doctor.torch_facts"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=TORCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"import torch did not end within {TORCH_TIMEOUT_S:.0f} s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return {"error": one_line(last)}
