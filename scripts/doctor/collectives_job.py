"""Start a node's ranks of scripts/doctor/collectives.py and return what each has found, within a bound."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipes.common.process.node import Node, how_ended
from recipes.common.process.ranks import is_loopback
from recipes.common.world.transport import find_network
from scripts.doctor.node import one_line
from scripts.launch.command import ROOT, temporary_folder
from scripts.launch.fabric import fabric_environment
from scripts.launch.processes import Ended, rank_environment, run_side_by_side

SET_BY_FABRIC = ("FABRIC", "NCCL_", "GLOO_", "FI_", "OMP_")


def fabric_variables() -> dict[str, str]:
    """Return the variables that fabric.sh sets where scripts/launch.sh would call it; raises UserError.

    That is between machines, and where FABRIC, SITE_ENV or site.env asks for it.
    """
    nnodes, master = os.environ.get("NNODES") or "1", os.environ.get("MASTER_ADDR") or "localhost"
    is_one_machine = nnodes == "1" or master == "localhost" or is_loopback(master)
    is_asked_for = os.environ.get("FABRIC") or os.environ.get("SITE_ENV") or (ROOT / "site.env").exists()
    if is_one_machine and not is_asked_for:
        return {}
    variables, _ = fabric_environment(RDZV_TIMEOUT_S="5", FABRIC="auto")
    return {name: value for name, value in variables.items() if name.startswith(SET_BY_FABRIC)}


def run_ranks(this_node: Node, interface: str, device: str, timeout_s: float) -> dict[str, Any]:
    """Run this node's ranks; return {"ranks": [each one's notes], "fabric": what fabric.sh set}, or an "error"."""
    try:
        fabric = fabric_variables()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"error": one_line(error), "ranks": []}
    if device == "cpu":
        fabric.pop("FABRIC_USED", None)  # NCCL uses no network, so nodes of different ones are no fault
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", **fabric}
    environment |= {"MASTER_ADDR": this_node.master_addr, "MASTER_PORT": str(this_node.master_port)}
    with temporary_folder() as folder:
        commands = []
        for local_rank in range(this_node.nproc_per_node):
            own = rank_environment(this_node.node_rank, this_node.nnodes, this_node.nproc_per_node, local_rank)
            own |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/{local_rank}.nccl"}
            words = ["--result", f"{folder}/{local_rank}.json", "--device", device]
            words += ["--timeout-s", str(max(5.0, timeout_s / 2))]
            commands.append(([sys.executable, "-m", "scripts.doctor.collectives", *words], environment | own))
        ended = run_side_by_side(commands, Path(folder), timeout_s)
        found = [read(Path(folder), rank, process) for rank, process in enumerate(ended)]
    return {"ranks": found, "fabric": fabric}


def read(folder: Path, local_rank: int, process: Ended) -> dict[str, Any]:
    """Return what a rank has noted; if it failed and noted no error, add its last line or its signal."""
    found: dict[str, Any] = {"local_rank": local_rank, "stage": "starting"}
    with contextlib.suppress(OSError, ValueError):
        found |= json.loads((folder / f"{local_rank}.json").read_text())
    with contextlib.suppress(OSError):
        said = (folder / f"{local_rank}.nccl").read_text(errors="replace")
        if network := find_network(said):
            found["network"] = network
    if process.status and "error" not in found:
        how = process.last_line if process.status > 0 else f"it {how_ended(process.status)}"
        found["error"] = "it did not end in time" if process.is_late else one_line(how)[:400]
    return found
