"""Measure all-reduce, broadcast and all-gather over sizes, by gloo, NCCL, MPI and Horovod.

    make commbench NODES=2 BACKENDS="gloo mpi"
    make commbench NODES=2 ARGS="--narrow 1gbit"

Starts the ranks of local nodes; with NNODES, NODE_RANK and MASTER_ADDR set, those of this node of a cluster.
Prints a table and writes runs/commbench-001/commbench.json. docs/commbench.md says what the columns are.
Exit status 0: all results were right; 1: a backend failed; 2: bad usage.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.process.node import Node, check_head
from scripts.bench.commbench.options import BACKENDS, OPS, add_options, parse_sizes
from scripts.bench.commbench.rows import COLUMNS, Row, link_speed, read_rows
from scripts.lab import network
from scripts.launch.agent import read_node
from scripts.launch.command import ROOT, CommandParser, check_names, command, count, next_folder, parse, table
from scripts.launch.horovod import environment as horovod_environment
from scripts.launch.horovod import rendezvous
from scripts.launch.interface import interface_to
from scripts.launch.local import LOOPBACK, free_port, node_environment, share_out, visible_gpus
from scripts.launch.processes import Ended, rank_environment, run_side_by_side
from scripts.launch.runs import measured_on

START_S = 60.0
"""How long ranks may take to start: imports of torch by all processes at once."""


@dataclass
class Place:
    """The nodes whose ranks are started here, and how they reach each other."""

    nodes: int
    processes: int
    """Of a node."""
    numbers: Sequence[int]
    """Of the nodes started here: all of them, or this one of a cluster."""
    address: str
    """Of node 0."""
    port: int | None
    """Of node 0; None: a free one."""
    interface: str
    link_gbit: float | None
    net: network.Network | None = None
    gpus: list[list[str]] = field(default_factory=list)

    @property
    def is_local(self) -> bool:
        """Whether all nodes are this machine."""
        return len(self.numbers) == self.nodes

    def environment(self, number: int, port: int) -> dict[str, str]:
        """Return the variables of a node's launcher."""
        if not self.is_local:
            return {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1"}
        shared = node_environment(number, self.nodes, self.processes, self.gpus[number], port)
        return {**shared, "GLOO_SOCKET_IFNAME": self.interface, "MASTER_ADDR": self.address}

    def enter(self, number: int, command: list[str]) -> list[str]:
        """Return a command that runs on a node."""
        return self.net.inside(number, command) if self.net else command


def options(argv: Sequence[str]) -> Namespace:
    """Return what was asked for; raises UserError for what cannot work."""
    parser = CommandParser("python -m scripts.bench.commbench", (__doc__ or "").split("\n")[0])
    parser.add_argument(
        "backends", nargs="*", metavar="BACKEND", help=f"some of {', '.join(BACKENDS)} (all there are)"
    )
    parser.add_argument("--nodes", type=count, help="local nodes (2; on a cluster NNODES)")
    parser.add_argument("--nproc-per-node", type=count, help="processes of each (GPUs of a node, else 1)")
    add_options(parser)
    parser.add_argument(
        "--narrow", metavar="RATE", help="as root: a network for each node, with links of 1gbit, say"
    )
    parser.add_argument(
        "--runs-dir", type=Path, default=ROOT / "runs", metavar="DIR", help="where commbench-001 goes"
    )
    args = parse(parser, argv)
    parse_sizes(args.sizes)
    check_names("--ops", args.ops.split(","), OPS)
    check_names("BACKENDS", args.backends, BACKENDS)
    if args.narrow:
        rate_gbit(args.narrow)
        if not args.nodes and os.environ.get("NNODES", "1") != "1":
            raise UserError("--narrow is for local nodes; leave it out on a cluster, or give NODES")
        if reason := network.why_not(narrow=True):
            raise UserError(f"--narrow: {reason}")
    return args


def rate_gbit(text: str) -> float:
    """Return a rate of tc's in Gbit/s; raises UserError for anything but whole kbit, mbit or gbit."""
    for unit, factor in {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0}.items():
        number = text.removesuffix(unit)
        if number != text and number.isascii() and number.isdigit() and int(number):
            return int(number) * factor
    raise UserError(f"--narrow expects a rate such as 100mbit or 1gbit, got {text!r}")


def find_place(args: Namespace) -> Place:
    """Return where the ranks go; raises UserError for what cannot work."""
    nnodes = os.environ.get("NNODES", "1")
    if not args.nodes and nnodes != "1":
        node = read_node()
        interface = interface_to(node.master_addr)
        speed = args.link_gbit or link_speed(interface)
        place = (node.nnodes, node.nproc_per_node, [node.node_rank], node.master_addr, node.master_port)
        return Place(*place, interface, speed)
    nodes = args.nodes or 2
    gpus = share_out(visible_gpus(), nodes)
    processes = args.nproc_per_node or max(1, len(gpus[0]))
    numbers = range(nodes)
    if not args.narrow:
        return Place(nodes, processes, numbers, "127.0.0.1", None, LOOPBACK, args.link_gbit, gpus=gpus)
    net = network.Network(nodes)
    for number in numbers:
        net.narrow(number, args.narrow, burst="256kb")
    speed = args.link_gbit or rate_gbit(args.narrow)
    return Place(nodes, processes, numbers, net.addresses[0], None, "eth0", speed, net, gpus)


def why_not(backend: str, place: Place) -> str:
    """Return why a backend cannot be measured here, "" if it can."""
    gpus = min((len(gpus) for gpus in place.gpus), default=0) if place.is_local else len(visible_gpus())
    if backend == "nccl" and gpus < place.processes:
        return f"it needs a GPU for each of a node's {place.processes} processes, and a node has {gpus}"
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        return "it is not installed: make horovod"
    if backend != "mpi":
        return ""
    if importlib.util.find_spec("mpi4py") is None or not shutil.which("mpirun"):
        return "there is no MPI: apt-get install openmpi-bin && pip install mpi4py"
    if not place.is_local:
        return (
            "mpirun or srun starts its ranks: mpirun -np 16 python -m scripts.bench.commbench.rank --backend mpi"
        )
    return ""


@contextlib.contextmanager
def commands(
    backend: str, place: Place, port: int, words: list[str]
) -> Iterator[list[tuple[list[str], Mapping[str, str]]]]:
    """Yield each process to start: its command and its environment."""
    command = [sys.executable, "-m", "scripts.bench.commbench.rank", "--backend", backend, *words]
    if backend == "mpi":
        ranks = place.nodes * place.processes
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        yield [(["mpirun", "-np", str(ranks), *mpi_words(place), *command], environment)]
        return
    started: list[tuple[list[str], Mapping[str, str]]] = []
    first = Node(place.nodes, place.numbers[0], place.processes, place.address, port, int(START_S))
    if place.net and backend == "horovod":
        first = Node(place.nodes, 0, place.processes, place.net.bridge, port, int(START_S))
    for number in place.numbers:
        node = Node(place.nodes, number, place.processes, first.master_addr, port, int(START_S))
        for local_rank in range(place.processes):
            shared = place.environment(number, port) | {"MASTER_PORT": str(port)}
            own = rank_environment(number, place.nodes, place.processes, local_rank)
            if backend == "horovod":
                own = {**horovod_environment(node, local_rank), "HOROVOD_GLOO_IFACE": place.interface}
            started.append((place.enter(number, command), {**shared, **own}))
    with rendezvous(first) if backend == "horovod" else contextlib.nullcontext():
        yield started


def mpi_words(place: Place) -> list[str]:
    """Return what leads Open MPI into the nodes' networks, over TCP alone; nothing where they have none."""
    if not place.net:
        return []
    hosts = ",".join(f"{name}:{place.processes}" for name in place.net.names[: place.nodes])
    settings = {
        "plm_rsh_agent": str(ROOT / "scripts/bench/commbench/on_node.sh"),
        "oob_tcp_if_include": f"{network.SUBNET}.0/24",
        "btl": "tcp,self",
        "btl_tcp_if_include": f"{network.SUBNET}.0/24",
    }
    return ["--host", hosts, *(word for name, value in settings.items() for word in ("--mca", name, value))]


def run_backend(backend: str, place: Place, port: int, args: Namespace) -> list[Row]:
    """Start a backend's ranks and return what rank 0 has measured (nothing where that is another node's).

    Raises:
        RuntimeError: it failed; the message is its own.
    """
    lines = len(args.ops.split(",")) * len(parse_sizes(args.sizes))
    bound_s = START_S + args.timeout_s + lines * (3 * args.seconds + 5)
    with tempfile.TemporaryDirectory(prefix="commbench-") as folder:
        result = Path(folder) / "rows.json"
        words = ["--ops", args.ops, "--sizes", args.sizes, "--seconds", str(args.seconds)]
        words += ["--timeout-s", str(args.timeout_s), "--result", str(result)]
        with commands(backend, place, port, words) as started:
            ended = run_side_by_side(started, Path(folder), bound_s)
        if any(one.is_late for one in ended):
            raise RuntimeError(f"not done within {bound_s:.0f} s")
        if failed := [one for one in ended if one.status]:
            raise RuntimeError(last_words(failed))
        return read_rows(result) if result.exists() else []


def last_words(failed: Sequence[Ended]) -> str:
    """Return the line in which a failed process says why, the first one's that does."""
    lines = [line for one in failed for line in one.output.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next(iter([*errors, *reversed(lines)]), "it ended without a word")


def facts(place: Place) -> dict[str, Any]:
    """Return where and with what was measured."""
    return {
        **measured_on("torch", "mpi4py", "horovod"),
        "nodes": place.nodes,
        "nproc_per_node": place.processes,
        "interface": place.interface,
        "link_gbit": place.link_gbit,
    }


def measure(args: Namespace, place: Place, chosen: Sequence[str]) -> tuple[list[Row], dict[str, str]]:
    """Measure one backend after another; return the rows, and why a backend has failed."""
    rows: list[Row] = []
    failures = {}
    for i, backend in enumerate(chosen):
        port = place.port + i if place.port else free_port()
        try:
            if not place.is_local:
                check_head(Node(place.nodes, place.numbers[0], 1, place.address, port, int(START_S)))
            rows += run_backend(backend, place, port, args)
        except (OSError, RuntimeError) as error:
            failures[backend] = str(error)
    return rows, failures


@command
def main(argv: list[str]) -> int:
    """Measure, print the table, write the file; return 1 where a backend has failed."""
    args = options(argv)
    if args.narrow:
        network.enter("scripts.bench.commbench", argv)
    place = find_place(args)
    reasons = {backend: reason for backend in BACKENDS if (reason := why_not(backend, place))}
    for backend in args.backends:
        if backend in reasons:
            raise UserError(f"{backend} cannot be measured here: {reasons[backend]}")
    chosen = args.backends or [backend for backend in BACKENDS if backend not in reasons]
    rows, failures = measure(args, place, chosen)
    if 0 in place.numbers:
        shown = [row.as_dict(place.link_gbit) for row in rows]
        if rows:
            print(table(COLUMNS, shown, left=2))
        for backend, reason in reasons.items():
            if not args.backends:
                print(f"{backend}: left out: {reason}")
        folder = next_folder("commbench", args.runs_dir.resolve())
        content = {**facts(place), "left_out": {} if args.backends else reasons, "failed": failures}
        content["rows"] = shown
        (folder / "commbench.json").write_text(json.dumps(content, indent=2) + "\n")
        print(f"wrote {os.path.relpath(folder / 'commbench.json')}")
    for backend, reason in failures.items():
        print(f"error: {backend}: {reason}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
