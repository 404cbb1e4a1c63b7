"""Measure all-reduce, broadcast and all-gather over sizes, by gloo, NCCL, MPI and Horovod.

    make commbench NODES=2 BACKENDS="gloo mpi"
    make commbench NODES=2 ARGS="--narrow 1gbit"

Starts the ranks of local nodes or, if NNODES, NODE_RANK and MASTER_ADDR are set, the ranks of this node of a
cluster. The launchers start them in the same way as a user's own script.
Prints a table and writes runs/commbench-001/commbench.json. docs/commbench.md describes the columns.
Exit status 0: all results were correct; 1: a backend failed; 2: bad usage.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.folders import replace_text
from scripts.bench.commbench.options import BACKENDS, add_options, check_options, parse_sizes
from scripts.bench.commbench.rows import COLUMNS, Row, link_speed
from scripts.lab import network
from scripts.launch.agent import read_node
from scripts.launch.command import (
    ROOT,
    CommandParser,
    check_names,
    check_writable,
    command,
    count,
    next_folder,
    parse,
)
from scripts.launch.interface import interface_to
from scripts.launch.local import LOOPBACK, visible_gpus
from scripts.launch.processes import run_side_by_side
from scripts.launch.runs import measured_on
from scripts.launch.tables import table

START_TIMEOUT_S = 120
"""Time allowed for the ranks to start: all processes import torch at once."""


@dataclass(frozen=True)
class Place:
    """Where the ranks run: on local nodes, or on this and other nodes of a cluster."""

    nodes: int
    processes: int  # per node
    gpus: int  # per node
    interface: str
    link_gbit: float | None
    net: network.Network | None = None
    node_rank: int | None = None  # of this node; set only on a cluster
    port: int = 0  # MASTER_PORT, on a cluster


def options(argv: Sequence[str]) -> Namespace:
    """Parse the command line; raises UserError if options are invalid or do not combine."""
    parser = CommandParser("python -m scripts.bench.commbench", __doc__)
    add = parser.add_argument
    add("backends", nargs="*", metavar="BACKEND", help=f"some of {', '.join(BACKENDS)} (all that are installed)")
    add("--nodes", type=count, help="local nodes (2; on a cluster NNODES)")
    add("--nproc-per-node", type=count, help="of each node (its GPUs, else 1; on a cluster NPROC_PER_NODE)")
    add_options(parser)
    add("--narrow", metavar="RATE", help="as root: a network namespace per node, links of RATE, such as 1gbit")
    add("--runs-dir", type=Path, default=ROOT / "runs", metavar="DIR", help="parent folder of commbench-001")
    args = parse(parser, argv)
    check_options(args)
    check_names("BACKENDS", args.backends, BACKENDS)
    args.is_cluster = not args.nodes and os.environ.get("NNODES", "1") != "1"
    if args.is_cluster and args.nproc_per_node:
        raise UserError("--nproc-per-node is for local nodes; on a cluster, set NPROC_PER_NODE")
    if args.narrow:
        rate_gbit(args.narrow)
        if args.is_cluster:
            raise UserError("--narrow is for local nodes; leave it out on a cluster, or give NODES")
        if reason := network.why_not(narrow=True):
            raise UserError(f"--narrow: {reason}")
    return args


def rate_gbit(text: str) -> float:
    """Convert a rate as tc writes it to Gbit/s; raises UserError unless it is whole kbit, mbit or gbit."""
    match = re.fullmatch(r"([1-9][0-9]*)([kmg])bit", text)
    if not match:
        raise UserError(f"--narrow expects a rate such as 100mbit or 1gbit, got {text!r}")
    return int(match[1]) * {"k": 1e-6, "m": 1e-3, "g": 1.0}[match[2]]


def find_place(args: Namespace) -> Place:
    """Return where the ranks run, and create the networks of --narrow; raises UserError if it cannot."""
    gpus = len(visible_gpus())
    if args.is_cluster:
        node = read_node()
        interface = interface_to(node.master_addr)
        speed = args.link_gbit or link_speed(interface)
        shape = (node.nnodes, node.nproc_per_node, gpus)
        return Place(*shape, interface, speed, node_rank=node.node_rank, port=node.master_port)
    nodes = args.nodes or 2
    gpus //= nodes
    processes = args.nproc_per_node or max(1, gpus)
    if not args.narrow:
        return Place(nodes, processes, gpus, LOOPBACK, args.link_gbit)
    net = network.Network(nodes)
    for number in range(nodes):
        net.narrow(number, 1e3 * rate_gbit(args.narrow))
    return Place(nodes, processes, gpus, "eth0", args.link_gbit or rate_gbit(args.narrow), net)


def speed_of(row: Row, place: Place, args: Namespace) -> float | None:
    """Return the speed in Gbit/s of the link that a row's bytes crossed; None if it is unknown."""
    may_use_fabric = row.device == "cuda" and place.node_rank is not None
    return args.link_gbit if may_use_fabric else place.link_gbit


def why_not(backend: str, place: Place) -> str:
    """Return the reason why a backend cannot be measured here; "" if it can."""
    if backend == "nccl" and place.gpus < place.processes:
        return f"it needs a GPU for each of a node's {place.processes} processes, and a node has {place.gpus}"
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        return "it is not installed: make horovod"
    if backend == "mpi" and (importlib.util.find_spec("mpi4py") is None or not shutil.which("mpirun")):
        return "there is no MPI: apt-get install openmpi-bin && pip install mpi4py"
    if backend == "mpi" and place.net:
        return "it would not use the networks of --narrow: leave that out"
    if backend == "mpi" and place.node_rank is not None:
        command = "mpirun -np 16 python -m scripts.bench.commbench.rank --backend mpi"
        return f"mpirun or srun starts its ranks: {command}"
    return ""


def launcher(backend: str, number: int, place: Place, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a backend's ranks, without their options, and its environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}  # a killed launcher leaves files
    if backend == "mpi":
        environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
        environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"  # from Open MPI 5 on
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        command = ["mpirun", "-np", str(place.nodes * place.processes), sys.executable]
        return [*command, "-m", "scripts.bench.commbench.rank"], environment
    script = {"SCRIPT": str(ROOT / "scripts/bench/commbench/rank.py"), "WORKDIR": str(ROOT), "RESUME": "none"}
    environment |= {**script, "RUN_DIR": str(folder), "RUNS_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    environment |= {"RDZV_TIMEOUT_S": str(START_TIMEOUT_S), "MIN_NODES": ""}
    recipe = "horovod" if backend == "horovod" else "ddp"  # its launcher starts the ranks
    if place.node_rank is not None:
        environment.setdefault("FABRIC", "auto")  # NCCL with the settings that training gets
        environment |= {"MASTER_PORT": str(place.port + number), "PYTHON": sys.executable}  # a port per backend
        return ["scripts/launch.sh", recipe], environment
    command = [sys.executable, "-m", "scripts.launch.local", recipe, "--nodes", str(place.nodes)]
    networks = place.net.option() if place.net else ""
    return [*command, "--nproc-per-node", str(place.processes), "--networks", networks, "--"], environment


def run_backend(backend: str, number: int, place: Place, args: Namespace) -> list[Row]:
    """Start a backend's ranks and return the rows of rank 0 (none if rank 0 is on another node).

    Raises RuntimeError, with its own error line or its last line, if it failed or exceeded its time limit.
    """
    lines = len(args.ops.split(",")) * len(parse_sizes(args.sizes))
    bound_s = START_TIMEOUT_S + args.timeout_s + lines * (3 * args.seconds + 6 * args.timeout_s)
    with tempfile.TemporaryDirectory(prefix="commbench-", ignore_cleanup_errors=True) as folder:
        result = Path(folder) / "rows.json"
        command, environment = launcher(backend, number, place, Path(folder))
        words = ["--backend", backend, "--ops", args.ops, "--sizes", args.sizes, "--seconds", str(args.seconds)]
        words += ["--timeout-s", str(args.timeout_s), "--result", str(result)]
        [ended] = run_side_by_side([([*command, *words], environment)], Path(folder), bound_s)
        if ended.is_late:
            raise RuntimeError(f"not done within {bound_s:.0f} s")
        if ended.status:
            said = re.search(r"^(?:\[node \d+\] )?error: (.*)", ended.output, re.MULTILINE)
            raise RuntimeError(said[1] if said else ended.last_line)
        return [Row(**row) for row in json.loads(result.read_text())] if result.exists() else []


@command
def main(argv: list[str]) -> int:
    """Measure, print the table and write the file; return 1 if a backend failed, else 0."""
    args = options(argv)
    if args.narrow:
        network.enter("scripts.bench.commbench", argv)
    place = find_place(args)
    reasons = {backend: reason for backend in BACKENDS if (reason := why_not(backend, place))}
    for backend in args.backends:
        if backend in reasons:
            raise UserError(f"{backend} cannot be measured here: {reasons[backend]}")
    left_out = {} if args.backends else reasons
    if not place.node_rank:
        check_writable(args.runs_dir)
    content = measured_on("torch", "mpi4py", "horovod")
    content |= {"nodes": place.nodes, "nproc_per_node": place.processes, "interface": place.interface}
    content |= {"link_gbit": place.link_gbit, "left_out": left_out}
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    path: Path | None = None
    for number, backend in enumerate(args.backends or [name for name in BACKENDS if name not in reasons]):
        try:
            rows += [row.as_dict(speed_of(row, place, args)) for row in run_backend(backend, number, place, args)]
        except (OSError, RuntimeError) as error:
            failed[backend] = str(error)
        if not place.node_rank:  # after each backend: the next one may be interrupted
            path = path or next_folder("commbench", args.runs_dir.resolve()) / "commbench.json"
            replace_text(path, json.dumps({**content, "failed": failed, "rows": rows}, indent=2) + "\n")
    if path:
        if rows:
            print(table(COLUMNS, rows, left=2))
        for backend, reason in left_out.items():
            print(f"{backend}: left out: {reason}")
        print(f"wrote {os.path.relpath(path)}")
    for backend, reason in failed.items():
        print(f"error: {backend}: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
