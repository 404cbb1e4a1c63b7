"""Run a job of several nodes on this machine: a scripts/launch.sh for each node, as a cluster would start them.

    python -m scripts.local ddp --nodes 2 --nproc-per-node 1 -- --epochs 3

`make run RECIPE=ddp NODES=2` calls it. Each node gets its NODE_RANK and its share of the GPUs and cores. Node 0
writes to this terminal; what other nodes print is marked with their number. USR1 and TERM are passed on (write a
checkpoint, then leave). Ctrl-C, or the end of any node with an error, ends every process within seconds.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from recipes.common.entry import USAGE_STATUS
from recipes.common.errors import PortTakenError, nearest
from recipes.common.parent import LAUNCHER_PID, end_with_parent
from recipes.common.watch import HANG_STATUS

ROOT = Path(__file__).resolve().parent.parent

ERROR_GRACE_S = 3.0
"""How long the other nodes may take to say what they have seen, once a node has failed."""

PORT_TRIES = 3
"""How many ports are tried: another process may take one between its choice and the moment rank 0 listens."""

STOP_GRACE_S = 60.0
"""How long a checkpoint may take after a stop signal."""

ONE_PROCESS = ("single", "dataparallel")
"""Recipes that are one process, however many GPUs there are."""

_PORTS = range(10000, 20000)
_offsets = itertools.count(secrets.randbelow(len(_PORTS)))

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def refuse(message: str) -> NoReturn:
    """Print one line and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(USAGE_STATUS)


def recipes() -> dict[str, str]:
    """Return every recipe with the first line of its docstring."""
    found = {}
    for path in sorted(ROOT.glob("recipes/*/train.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.parent.name] = docstring.split("\n")[0]
    return found


def check_recipe(name: str) -> str:
    """Return the name of a recipe that exists, or refuse with the nearest."""
    known = recipes()
    if name not in known:
        hint = nearest(name, known, cutoff=0.4)  # names are short: two of three letters already say much
        refuse(f"RECIPE wants one of {', '.join(known)}, got {name!r}{hint}")
    return name


def count(name: str, text: str) -> int:
    """Return a number of nodes or processes, or refuse."""
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 1024:
        refuse(f"{name} wants a whole number from 1 to 1024, got {text!r}")
    return int(text)


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine as CUDA_VISIBLE_DEVICES would name them, without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip()]
    if not shutil.which("nvidia-smi"):
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout
    return re.findall(r"^GPU (\d+):", listing, re.MULTILINE)


def share_out(gpus: list[str], nodes: int) -> list[list[str]]:
    """Return each node's GPUs: as many for each, none at all where there are fewer GPUs than nodes."""
    share = len(gpus) // nodes
    return [gpus[node * share : (node + 1) * share] for node in range(nodes)]


def free_port() -> int:
    """Return a TCP port that nobody listens on now, another one each time.

    It lies below those that a system gives to outgoing connections and to whoever asks for any port: one of those
    may be somebody else's by the time that rank 0 listens.
    """
    for offset in itertools.islice(_offsets, len(_PORTS)):
        port = _PORTS[offset % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    refuse(f"no port is free from {_PORTS[0]} to {_PORTS[-1]}; end what holds them (ss -tlnp shows it)")


def node_environment(node: int, nodes: int, processes: int, gpus: list[str], port: int) -> dict[str, str]:
    """Return the environment of one node: the five variables, its GPUs, and what suits one machine."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("MIN_NODES", "COORDINATOR")},
        "NNODES": str(nodes),
        "NODE_RANK": str(node),
        "NPROC_PER_NODE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "PORT_IS_CHOSEN": "1",
        "PYTHON": sys.executable,
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # All nodes are this machine: a thread per core in all, and nothing listens beyond it.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // (nodes * processes))))
    # Threads that wait at a barrier soon sleep instead of burning a core that another process wants.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    environment.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    return environment


class LocalJob:
    """The nodes of a job on this machine, from their start to their common end."""

    def __init__(self) -> None:
        self.nodes: list[subprocess.Popen[str]] = []
        self.relays: list[threading.Thread] = []
        self.refusals: list[str] = []
        self.interrupted_by = 0
        self.stop_signals: set[int] = set()
        self.stop_deadline = float("inf")

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start the next node in a session of its own: what the terminal sends comes here first."""
        is_first = not self.nodes
        node = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, LAUNCHER_PID: str(os.getpid())},
            start_new_session=True,
            preexec_fn=end_with_parent,
            stdin=subprocess.DEVNULL,
            stdout=None if is_first else subprocess.PIPE,
            stderr=None if is_first else subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.nodes.append(node)
        if not is_first:
            relay = threading.Thread(target=self.relay, args=(len(self.nodes) - 1, node), daemon=True)
            relay.start()
            self.relays.append(relay)

    def relay(self, number: int, node: subprocess.Popen[str]) -> None:
        """Pass a node's lines on, marked with its number; keep refusals, which node 0 may say as well."""
        assert node.stdout
        for line in node.stdout:
            if line.startswith("error: "):
                self.refusals.append(f"[node {number}] {line}")
            else:
                sys.stderr.write(f"[node {number}] {line}")

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Remember a stop signal: wait() then sends it to every node."""
        self.stop_signals.add(number)
        self.stop_deadline = min(self.stop_deadline, time.monotonic() + STOP_GRACE_S)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Remember Ctrl-C: wait() then ends everything."""
        self.interrupted_by = number

    def wait(self) -> int:
        """Wait for all nodes; on the first failure or Ctrl-C end the others; return the job's status."""
        failed_at: float | None = None
        next_signal = 0.0
        while any(node.poll() is None for node in self.nodes):
            now = time.monotonic()
            if failed_at is None and any(self.has_failed(node) for node in self.nodes):
                failed_at = now
            late = failed_at is not None and now > failed_at + ERROR_GRACE_S
            if late or self.interrupted_by or now > self.stop_deadline:
                self.kill()
                break
            if self.stop_signals and now > next_signal:  # again each second: a node may not have listened yet
                next_signal = now + 1
                for node in self.nodes:
                    node.send_signal(max(self.stop_signals))
            time.sleep(0.05)
        first_failed = [number for number, node in enumerate(self.nodes) if self.has_failed(node)]
        for node in self.nodes:
            node.wait()
        for relay in self.relays:
            relay.join(timeout=1)
        return self.report(first_failed)

    def has_failed(self, node: subprocess.Popen[str]) -> bool:
        """Whether a node ended badly; one that a stop signal met before it listened to signals did not."""
        status = node.poll()
        return status is not None and status != 0 and -status not in self.stop_signals

    def report(self, failed: list[int]) -> int:
        """Say why the job has failed, once, and return its exit status."""
        if self.interrupted_by:
            print("interrupted; checkpoints so far are whole: add --resume auto to go on", file=sys.stderr)
            return 128 + self.interrupted_by
        if not failed:
            if any(self.has_failed(node) for node in self.nodes):
                print(f"error: no checkpoint within {STOP_GRACE_S:.0f} s of the signal; killed", file=sys.stderr)
                return 1
            return 0
        statuses = {number: self.nodes[number].returncode for number in failed}
        # Where another program has the port, nodes that reach it instead of node 0 may call that a mistake.
        if statuses.get(0) == USAGE_STATUS and PortTakenError.status not in statuses.values():
            return USAGE_STATUS  # node 0 has said why
        sys.stderr.writelines(self.refusals)
        for spoken in (PortTakenError.status, USAGE_STATUS, HANG_STATUS):
            if spoken in statuses.values():
                return spoken
        for number, status in statuses.items():
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            print(f"error: node {number} {how}; all nodes are stopped", file=sys.stderr)
        return max(status if status > 0 else 128 - status for status in statuses.values())

    def kill(self) -> None:
        """Kill every node's agent; its processes end with it (recipes/common/parent.py)."""
        for node in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)


def check_elastic(args: argparse.Namespace, recipe: str, nodes: int) -> tuple[int, int] | None:
    """Return MIN_NODES and MAX_RESTARTS of an elastic job, None for any other, or refuse."""
    if not args.min_nodes:
        if args.max_restarts:
            refuse("MAX_RESTARTS belongs to an elastic job: set MIN_NODES too")
        return None
    min_nodes = count("MIN_NODES", args.min_nodes)
    if min_nodes > nodes:
        refuse(f"MIN_NODES {min_nodes} is more than NODES {nodes}")
    if recipe in ONE_PROCESS or recipe == "probe":
        refuse(f"{recipe} is not for an elastic job; RECIPE=ddp is, say")
    max_restarts = args.max_restarts or "3"
    if not (max_restarts.isascii() and max_restarts.isdigit()) or int(max_restarts) > 1000:
        refuse(f"MAX_RESTARTS wants a whole number from 0 to 1000, got {max_restarts!r}")
    return min_nodes, int(max_restarts)


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the launcher's own arguments; what follows -- is the recipe's."""
    parser = argparse.ArgumentParser(prog="python -m scripts.local", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", nargs="?", default="")
    parser.add_argument("--nodes", default="1")
    parser.add_argument("--nproc-per-node", default="")
    parser.add_argument("--min-nodes", default="", help="go on with so many, and take in those that come back")
    parser.add_argument("--max-restarts", default="", help="rounds after the first, with --min-nodes (3)")
    # NAMESPACE=ADDRESS,...: a network for each node, from scripts/network.py
    parser.add_argument("--networks", default="", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="list the recipes and exit")
    own, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    args = parser.parse_args(own)
    args.options = options
    return args


def main(argv: list[str] | None = None) -> int:
    """Start the nodes, see them to their end, and return the job's exit status."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.list:
        for name, summary in recipes().items():
            print(f"{name:14} {summary}")
        return 0
    recipe = check_recipe(args.recipe)
    nodes = count("NODES", args.nodes)
    shares = share_out(visible_gpus(), nodes)
    default = 1 if recipe in ONE_PROCESS else max(1, len(shares[0]))
    processes = count("NPROC_PER_NODE", args.nproc_per_node or str(default))
    elastic = check_elastic(args, recipe, nodes)
    if os.environ.get("MAKELEVEL"):
        end_with_parent(number=signal.SIGINT)  # make has been killed: nobody waits for this job any more

    for _ in range(PORT_TRIES):
        status = run_job(args, shares, processes, elastic)
        if status != PortTakenError.status:
            break
    return status


def run_job(
    args: argparse.Namespace, shares: list[list[str]], processes: int, elastic: tuple[int, int] | None
) -> int:
    """Start a node for each share of the GPUs, see them to their end, and return the job's exit status.

    Args:
        args: the launcher's own arguments, and the recipe's.
        shares: the GPUs of each node.
        processes: how many ranks a node starts.
        elastic: MIN_NODES and MAX_RESTARTS, or None.
    """
    if elastic:
        from scripts.elastic.local_nodes import ElasticJob

    nodes, port = len(shares), free_port()
    networks = [tuple(pair.split("=")) for pair in args.networks.split(",") if pair]
    job = ElasticJob(nodes, *elastic, networks[-1][1] if networks else "127.0.0.1") if elastic else LocalJob()
    signal.signal(signal.SIGINT, job.interrupt)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, job.pass_on)
    with tempfile.TemporaryDirectory(prefix="cluster-recipes-") as scratch:  # killed nodes leave files there
        for node in range(nodes):
            environment = node_environment(node, nodes, processes, shares[node], port) | {"TMPDIR": scratch}
            prefix = []
            if networks:
                environment |= {"MASTER_ADDR": networks[0][1], "GLOO_SOCKET_IFNAME": "eth0"}
                prefix = ["nsenter", f"--net=/run/netns/{networks[node][0]}", "--"]
            job.start([*prefix, "scripts/launch.sh", args.recipe, *args.options], environment)
        return job.wait()


if __name__ == "__main__":
    sys.exit(main())
