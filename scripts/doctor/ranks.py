"""Start a node's ranks of scripts/doctor/collectives.py and return what each has found, within a bound."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recipes.common.parent import end_with_parent
from scripts.doctor.node import COMMAND_TIMEOUT_S, ROOT, one_line

END_GRACE_S = 5.0
"""How long ranks may go on after one of them has failed: they notice it by themselves."""


def fabric_environment() -> dict[str, str]:
    """Return the environment as scripts/fabric.sh leaves it, where FABRIC asks for that; raises ValueError."""
    if not os.environ.get("FABRIC"):
        return {}
    script = "source scripts/fabric.sh >&2 && env --null"
    environment = {**os.environ, "PYTHON": sys.executable, "RDZV_TIMEOUT_S": "5"}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    if done.returncode:
        raise ValueError(one_line(done.stderr.strip().removeprefix("error: ")))
    variables = dict(item.split("=", 1) for item in done.stdout.split("\0") if "=" in item)
    return {name: value for name, value in variables.items() if name.startswith(("NCCL_", "GLOO_", "FI_", "OMP_"))}


def run_ranks(
    nnodes: int,
    node_rank: int,
    nproc: int,
    address: tuple[str, int],
    interface: str,
    device: str,
    timeout_s: float,
) -> dict[str, Any]:
    """Return {"ranks": [what each rank of this node has noted], "fabric": what scripts/fabric.sh has set}."""
    try:
        fabric = fabric_environment()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"error": one_line(error), "ranks": []}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", **fabric}
    environment |= {
        "WORLD_SIZE": str(nnodes * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
    }
    with tempfile.TemporaryDirectory(prefix="cluster-recipes-") as folder:
        processes = []
        for local_rank in range(nproc):
            own = {"RANK": str(node_rank * nproc + local_rank), "LOCAL_RANK": str(local_rank)}
            words = ["--result", f"{folder}/{local_rank}.json", "--device", device]
            words += ["--timeout-s", str(max(5.0, timeout_s / 2))]
            with open(f"{folder}/{local_rank}.txt", "wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "scripts.doctor.collectives", *words],
                        cwd=ROOT,
                        env=environment | own,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        preexec_fn=end_with_parent,
                    )
                )
        late = wait(processes, timeout_s)
        found = [read(Path(folder), rank, process, late) for rank, process in enumerate(processes)]
    return {"ranks": found, "fabric": fabric}


def wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Wait for all; kill what is left at the bound, or a while after a failure; return whether it was late."""
    deadline = time.monotonic() + timeout_s
    has_failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if not has_failed and any(process.poll() for process in processes):
            has_failed, deadline = True, min(deadline, time.monotonic() + END_GRACE_S)
        time.sleep(0.05)
    late = False
    for process in processes:
        if process.poll() is None:
            late = not has_failed
            process.kill()
        process.wait()
    return late


def read(folder: Path, local_rank: int, process: subprocess.Popen[bytes], late: bool) -> dict[str, Any]:
    """Return what a rank has noted, its exit status, and its last words where it did not note an error."""
    found: dict[str, Any] = {"local_rank": local_rank, "stage": "starting"}
    with contextlib.suppress(OSError, ValueError):
        found |= json.loads((folder / f"{local_rank}.json").read_text())
    found["status"] = process.returncode
    if process.returncode and "error" not in found:
        if process.returncode < 0:
            how = (
                "it did not come to an end"
                if late
                else f"it was ended by {signal.Signals(-process.returncode).name}"
            )
        else:
            lines = (folder / f"{local_rank}.txt").read_text(errors="replace").strip().splitlines()
            how = lines[-1] if lines else f"status {process.returncode}"
        found["error"] = one_line(how)[:400]
    return found
