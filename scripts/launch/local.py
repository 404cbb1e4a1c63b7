"""Run a job of several nodes on this machine: a scripts/launch.sh for each node, as a cluster would start them.

    python -m scripts.launch.local ddp --nodes 2 --nproc-per-node 1 -- --epochs 3

`make run RECIPE=ddp NODES=2` calls it. Each node gets its NODE_RANK and its share of the GPUs and cores. Node 0
writes to this terminal; lines of other nodes are marked with their number. USR1 and TERM are passed on (write a
checkpoint, then leave). Ctrl-C, or a node that fails, ends every process within seconds.
"""

from __future__ import annotations

import collections
import contextlib
import io
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
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from recipes.common.arguments import whole_number
from recipes.common.errors import UserError
from recipes.common.folders import open_own
from recipes.common.process.entry import USAGE_STATUS
from recipes.common.process.node import how_ended, shell_status
from recipes.common.process.parent import end_with_parent
from recipes.common.process.rendezvous_errors import PortTakenError
from recipes.common.process.signals import STOP_SIGNALS, handle_stop_signals
from recipes.common.watch.timeouts import HANG_STATUS
from scripts.launch import script
from scripts.launch.command import (
    ONE_PROCESS,
    RECIPE_OPTIONS,
    CommandParser,
    check_elastic,
    check_recipe,
    command,
    count,
    parse,
    recipes,
    temporary_folder,
    warn,
)
from scripts.launch.cores import count_cores
from scripts.launch.processes import end_sessions, start_process
from scripts.launch.recipe_options import read_option
from scripts.launch.rejoin import LOST_STATUS

FAILURE_GRACE_S = 3.0
"""How long the other nodes may take to print their own errors once a node has failed."""

PORT_TRIES = 3
"""How many ports are tried: another process may take one after it was chosen, before rank 0 listens."""

DEVICES = Path("/dev")

BAR_EVERY_S = 5.0
"""How often a progress bar is shown if its node does not write to the terminal itself."""

MOST_PER_CORE = 8
"""More processes per core than this are worth a warning: each imports torch, and 60 on two cores take minutes."""

STOP_GRACE_S = 60.0
"""How long a script may take after a stop signal."""

_PORTS = range(10000, 20000)
_offsets = itertools.count(secrets.randbelow(len(_PORTS)))
_held: collections.deque[socket.socket] = collections.deque(maxlen=64)

OUTER = ("MIN_NODES", "RDZV_ENDPOINT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables of a job in which this launcher is called, such as in the pod of a PyTorchJob."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def visible_gpus() -> list[str]:
    """Return this machine's GPUs as CUDA_VISIBLE_DEVICES names them, without importing torch; raises UserError."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        listed = os.environ["CUDA_VISIBLE_DEVICES"]
        if listed.strip() in ("-1", "NoDevFiles"):  # how users and Slurm say that there is none
            return []
        return [gpu for gpu in listed.split(",") if gpu.strip()]
    if not shutil.which("nvidia-smi"):
        if found := next(DEVICES.glob("nvidia[0-9]*"), None):  # a container may have any one of them
            what = f"{found} is there and nvidia-smi is not in PATH: no GPU is used"
            warn(f"{what}; set CUDA_VISIBLE_DEVICES=0,1,... to use them")
        return []
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        raise UserError("nvidia-smi -L does not answer; fix the driver, or set CUDA_VISIBLE_DEVICES") from None
    if listing.returncode:
        last = "".join((listing.stdout + listing.stderr).strip().splitlines()[-1:])
        warn(f"nvidia-smi -L failed (status {listing.returncode}): {last}")
    # MIG: CUDA shows one instance of one GPU to a process, and no GPU beside it.
    gpus = re.findall(r"^GPU (\d+):.*\n(?!\s+MIG)", f"{listing.stdout}\n", re.MULTILINE)
    if instances := re.findall(r"^\s+MIG .*UUID: (MIG-[^)]*)", listing.stdout, re.MULTILINE):
        gpus = gpus or instances[:1]
        what = f"of {len(instances)} MIG instances, each process can use one: this job uses {','.join(gpus)}"
        warn(f"{what}; set CUDA_VISIBLE_DEVICES to choose")
    return gpus


def share_out(gpus: list[str], nodes: int) -> list[list[str]]:
    """Return each node's GPUs: the same number for each, none if there are fewer GPUs than nodes."""
    share = len(gpus) // nodes
    return [gpus[node * share : (node + 1) * share] for node in range(nodes)]


def free_port(address: str = "", ports: Sequence[int] = ()) -> int:
    """Return a TCP port of an address ("": all) on which nobody listens now, a different one each time.

    By default it lies below the ephemeral ports, which a system gives to outgoing connections and to callers that
    ask for any port (as (0,) does here): another process could take one of those before rank 0 listens. On Linux
    this process holds the last 64 ports, so that no other gets them; a listener that sets SO_REUSEADDR can still
    use them.
    """
    ports = ports or _PORTS
    for offset in itertools.islice(_offsets, len(ports)):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        probe = socket.socket(family)
        with contextlib.suppress(OSError):
            probe.bind((address, ports[offset % len(ports)]))
            port: int = probe.getsockname()[1]
            if sys.platform == "linux":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after bind(): that was exclusive
                _held.append(probe)
            else:
                probe.close()
            return port
        probe.close()
    raise UserError(f"no port is free from {ports[0]} to {ports[-1]}; free some (ss -tlnp lists their users)")


def threads_per_process(nodes: int, processes: int) -> str:
    """Return OMP_NUM_THREADS of nodes on this machine: as it is set, else so that each core has one thread.

    Raises UserError if it is set to something else than numbers.
    """
    text = os.environ.get("OMP_NUM_THREADS") or str(max(1, count_cores() // (nodes * processes)))
    if not re.fullmatch(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*", text):
        raise UserError(f"OMP_NUM_THREADS expects a number of threads, got {text!r}; unset it")
    return text


def node_environment(node: int, nodes: int, processes: int, gpus: list[str], port: int) -> dict[str, str]:
    """Return the environment of one node: the five launch variables, its GPUs, and settings for one machine."""
    environment = {
        **keep_compiled_code(),
        **{name: value for name, value in os.environ.items() if name not in OUTER},
        "NNODES": str(nodes),
        "NODE_RANK": str(node),
        "NPROC_PER_NODE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "OMP_NUM_THREADS": threads_per_process(nodes, processes),
        "PORT_IS_CHOSEN": "1",
        "PYTHON": sys.executable,
    }
    # Threads that wait at a barrier soon sleep instead of burning a core that another process needs.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    environment.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # nothing listens beyond it
    return environment


def keep_compiled_code() -> dict[str, str]:
    """Return the variable that makes torch keep compiled code for later jobs: its default, TMPDIR, ends with one.

    Torch runs what it finds there, and the name can be guessed: {} if others own the folder, or can write to it.
    """
    folder = Path(tempfile.gettempdir(), f"torchinductor_{os.geteuid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        os.close(open_own(folder))
        return {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return {}


class LocalJob:
    """The nodes of a job on this machine, from their start until all have ended."""

    is_elastic = False

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}  # of all nodes
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.relays: list[threading.Thread] = []
        self.refusals: list[str] = []
        self.held_until = 0.0
        self.interrupted_by = 0
        self.how_to_resume = ""
        self.stop_signals: set[int] = set()
        self.stop_grace_s = STOP_GRACE_S
        self.stop_deadline = float("inf")

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start the next node."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if self.nodes else {}
        if self.is_elastic:  # rank 0, which uses standard output, may be on any node
            streams = {"stderr": subprocess.PIPE}
        node = start_process(command, {**environment, **self.environment}, **streams)
        relay = threading.Thread(target=self.relay, args=(len(self.nodes), node), daemon=True)
        self.nodes.append(node)
        self.relays.append(relay)
        relay.start()

    def relay(self, number: int, node: subprocess.Popen[bytes]) -> None:
        """Print a node's lines, marked with its number; hold refusals back, since node 0 may print them too."""
        stream, next_bar = node.stdout or node.stderr, 0.0
        if not stream:  # node 0 writes to the terminal itself
            return
        for line in io.TextIOWrapper(stream, errors="replace", newline=""):
            if line.endswith("\r"):  # a state of a progress bar
                if not line.strip() or time.monotonic() < next_bar:
                    continue
                next_bar = time.monotonic() + BAR_EVERY_S
            marked = f"[node {number}] {line.rstrip()}\n"
            if line.startswith("error: ") and not self.is_elastic:
                self.held_until = time.monotonic() + FAILURE_GRACE_S
                self.refusals.append(marked)
            else:
                with contextlib.suppress(OSError):  # nobody reads it; the node must not wait
                    sys.stderr.write(marked)

    def print_refusals(self) -> None:
        """Print the lines that were held back."""
        lines, self.refusals = self.refusals, []
        with contextlib.suppress(OSError):
            sys.stderr.writelines(lines)

    def handle_signals(self) -> None:
        """Handle the signals of this process from now on: Ctrl-C, and those that ask the ranks to stop."""
        signal.signal(signal.SIGINT, self.interrupt)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # a lost connection; nohup ignores it
            signal.signal(signal.SIGHUP, self.interrupt)
        handle_stop_signals(self.record_stop)  # an earlier job has blocked them

    def record_stop(self, number: int, frame: FrameType | None) -> None:
        """Record a stop signal; wait() then sends it to every node."""
        self.stop_signals.add(number)
        self.stop_deadline = min(self.stop_deadline, time.monotonic() + self.stop_grace_s)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Record Ctrl-C, or the end of the terminal; wait() then ends everything."""
        self.interrupted_by = number

    def wait(self) -> int:
        """Wait for all nodes, and end the others on the first failure or Ctrl-C; return the job's exit status."""
        error_deadline, next_signal = float("inf"), 0.0
        while any(node.poll() is None for node in self.nodes):
            now = time.monotonic()
            if self.failed():
                error_deadline = min(error_deadline, now + FAILURE_GRACE_S)
            elif self.refusals and now > self.held_until:  # the job continues: the line was no refusal
                self.print_refusals()
            if self.interrupted_by or now > min(error_deadline, self.stop_deadline):
                first_failed = self.failed()  # nodes that are killed below did not fail by themselves
                end_sessions([node.pid for node in self.nodes])
                break
            if self.stop_signals and now > next_signal:  # again each second: a node may have had no handlers yet
                next_signal = now + 1
                for node in self.nodes:
                    node.send_signal(max(self.stop_signals))
            time.sleep(0.05)
        else:
            first_failed = self.failed()
        # Python restores their defaults while it ends, and a late one would kill it; a next job gets it.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        for node in self.nodes:
            node.wait()
        for relay in self.relays:
            relay.join(timeout=1)
        return self.report(first_failed)

    def failed(self) -> list[int]:
        """Return the numbers of the nodes that have failed so far."""
        return [number for number, node in enumerate(self.nodes) if self.has_failed(node)]

    def has_failed(self, node: subprocess.Popen[bytes]) -> bool:
        """Whether a node failed; one that a stop signal killed before it had its handlers did not."""
        status = node.poll()
        return status is not None and status != 0 and -status not in self.stop_signals

    def report(self, failed: list[int]) -> int:
        """Print once why the job failed, and return its exit status."""
        statuses = {number: self.nodes[number].returncode for number in failed}
        # If another program has the port, nodes that reach that program instead of node 0 may report a mistake.
        is_refused = statuses.get(0) == USAGE_STATUS and PortTakenError.status not in statuses.values()
        if not is_refused:  # otherwise node 0 has printed it
            self.print_refusals()
        if self.interrupted_by:
            whole = f"; checkpoints so far are whole: {self.how_to_resume}" if self.how_to_resume else ""
            with contextlib.suppress(OSError):  # after SIGHUP: the terminal has gone
                print(f"interrupted{whole}", file=sys.stderr)
            return 128 + self.interrupted_by
        if not failed:
            if any(self.has_failed(node) for node in self.nodes):
                print(f"error: still running {self.stop_grace_s:.0f} s after the signal; killed", file=sys.stderr)
                return 1
            name = signal.Signals(max(self.stop_signals)).name if self.stop_signals else ""
            if all(node.returncode < 0 for node in self.nodes):  # they had no handlers yet, and printed nothing
                print(f"stopped by {name}", flush=True)
            elif name and script.is_set():  # a recipe's ranks have said so
                how = f"NAME={Path(os.environ['RUN_DIR']).name} RESUME=auto"
                print(f"got {name}; to resume: the same command with {how}", flush=True)
            return 0
        for spoken in (PortTakenError.status, USAGE_STATUS, HANG_STATUS):
            if spoken in statuses.values():
                return spoken
        for number, status in statuses.items():
            print(f"error: node {number} {how_ended(status)}; all nodes are stopped", file=sys.stderr)
        return max(map(shell_status, statuses.values()))


class ElasticJob(LocalJob):
    """Nodes that may be lost, and the store through which the others continue (scripts/launch/elastic.py)."""

    is_elastic = True

    def __init__(self, min_nodes: int, max_restarts: int, address: str, remedy: str) -> None:
        super().__init__()
        self.remedy = remedy
        port = free_port()
        self.environment = {"MIN_NODES": str(min_nodes), "MAX_RESTARTS": str(max_restarts)}
        self.environment["RDZV_ENDPOINT"] = f"{address}:{port}"
        command = [sys.executable, "-m", "scripts.launch.elastic", str(port), address]
        self.store = start_process(command, {**os.environ, "PORT_IS_CHOSEN": "1"})

    def wait(self) -> int:
        """Wait for the nodes, then stop the store; return the job's exit status."""
        status = super().wait()
        self.store.kill()
        self.store.wait()
        return status

    def has_failed(self, node: subprocess.Popen[bytes]) -> bool:
        """Whether a node, or the store, failed; a lost node has not failed, since the others continue."""
        return (super().has_failed(node) and not self.is_lost(node)) or bool(self.store.poll())

    def is_lost(self, node: subprocess.Popen[bytes]) -> bool:
        """Whether a node has lost the store or was killed, except by a stop signal that came as it ended."""
        return super().has_failed(node) and (node.returncode < 0 or node.returncode == LOST_STATUS)

    def report(self, failed: list[int]) -> int:
        """Print why the job failed, and return its exit status."""
        if status := self.store.poll():
            if status > 0:
                return int(status)  # the store has printed the reason
            say = f"error: the job's store {how_ended(status)}, so all nodes are stopped"
            print(f"{say}; {self.remedy}", file=sys.stderr)
            return 1
        if not self.interrupted_by and all(self.is_lost(node) for node in self.nodes):
            print(f"error: all nodes are lost; {self.remedy}", file=sys.stderr)
            return 1
        return super().report(failed)


def read_elastic(args: Namespace) -> tuple[int, int] | None:
    """Return MIN_NODES and MAX_RESTARTS of an elastic job, or None for any other job; raises UserError."""
    if args.min_nodes is None:
        if args.max_restarts is not None:
            raise UserError("MAX_RESTARTS belongs to an elastic job: set MIN_NODES too")
        return None
    if args.min_nodes > args.nodes:
        raise UserError(f"MIN_NODES {args.min_nodes} is more than NODES {args.nodes}; lower it")
    check_elastic(args.recipe)
    return args.min_nodes, 3 if args.max_restarts is None else args.max_restarts


def networks(text: str) -> list[list[str]]:
    """Read pairs of a network namespace and an address: n0=10.79.0.1,n1=10.79.0.2."""
    return [pair.split("=") for pair in text.split(",") if pair]


def parse_args(
    argv: list[str], prog: str = "python -m scripts.launch.local", doc: str | None = __doc__, hides: bool = False
) -> Namespace:
    """Return the launcher's own arguments, with the recipe's (after --) in `options`; --help shows `doc`.

    With `hides`, --help leaves out the options that only scripts.launch.local takes.
    """

    def own(text: str) -> str:
        return SUPPRESS if hides else text

    parser = CommandParser(prog, doc, RECIPE_OPTIONS)
    parser.add_argument("recipe", nargs="?", default="")
    parser.add_argument("--nodes", type=count, default=1, help="nodes on this machine")
    parser.add_argument("--nproc-per-node", type=count, help="processes per node (its GPUs, else 1)")
    parser.add_argument("--min-nodes", type=count, help=own("elastic: least nodes to continue with"))
    restarts = whole_number(0, 1000)
    parser.add_argument("--max-restarts", type=restarts, help=own("elastic: restarts after failures (3)"))
    # NAMESPACE=ADDRESS,...: a network for each node, then the store's, from scripts/lab/network.py
    parser.add_argument("--networks", type=networks, default=[], help=SUPPRESS)
    # What to type after Ctrl-C, if that is not --resume auto: from a command that starts several jobs
    parser.add_argument("--how-to-resume", help=SUPPRESS)
    parser.add_argument("--name", default="", help="the run's name, with SCRIPT")
    parser.add_argument("--list", action="store_true", help=own("list the recipes and exit"))
    return parse(parser, argv)


def assign_gpus(nodes: int, options: Sequence[str]) -> list[list[str]]:
    """Return each node's GPUs; print a warning if there are some, but not one for each node."""
    gpus = visible_gpus()
    shares = share_out(gpus, nodes)
    if gpus and not shares[0] and read_option("--device", "auto", options) != "cpu":
        what = f"{nodes} nodes share {len(gpus)} GPU{'s' * (len(gpus) > 1)}, so none of them gets any"
        warn(f"{what}; NODES={len(gpus)} uses them")
    return shares


def processes_per_node(args: Namespace, shares: list[list[str]]) -> int:
    """Return --nproc-per-node (default: a node's GPUs, else 1); warn if that is too many for this machine."""
    processes = args.nproc_per_node or (1 if args.recipe in ONE_PROCESS else max(1, len(shares[0])))
    total, cores = args.nodes * processes, count_cores()
    if total > MOST_PER_CORE * cores:
        what = f"{total} processes share {cores} core{'s' * (cores > 1)}, and may take minutes to start"
        warn(f"{what}; use fewer NODES or NPROC_PER_NODE")
    return processes


def name_run(recipe: str) -> str:
    """Return a name for a run of a recipe: two jobs may start in one second."""
    return f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def how_to_resume(args: Namespace, is_named: bool) -> str:
    """Return how to resume a recipe after Ctrl-C; "" if that is not known, as of a script."""
    if script.is_set():
        return ""
    if args.how_to_resume is not None:
        return str(args.how_to_resume)
    # Without a name, --resume auto may continue the run before: this one may not have begun.
    name = read_option("--name", "", args.options) or "with the name of this run"
    return f"add --resume auto{'' if is_named else f' and --name {name}'} to resume"


@command
def main(argv: list[str]) -> int:
    """Start the nodes, wait until they have ended, and return the job's exit status."""
    args = parse_args(argv)
    if args.list:
        for name, summary in recipes().items():
            print(f"{name:14} {summary}")
        return 0
    check_recipe(args.recipe)
    shares = assign_gpus(args.nodes, args.options)
    elastic = read_elastic(args)
    processes = processes_per_node(args, shares)
    if script.is_set():
        os.environ |= script.job_environment(args.name)
        script.lock_run_dir(Path(os.environ["RUN_DIR"]))
        print(
            f"{os.environ['SCRIPT']}: {args.nodes} nodes x {processes}, "
            f"WORKDIR {os.environ['WORKDIR']}, RUN_DIR {os.environ['RUN_DIR']}",
            flush=True,
        )
    if os.environ.get("MAKELEVEL"):
        end_with_parent(number=signal.SIGINT)  # if make is killed, nobody waits for this job

    for _ in range(PORT_TRIES):
        job = make_job(args, elastic)
        status = run_job(job, args, shares, processes)
        if status != PortTakenError.status or job.stop_signals:
            break
        if script.is_set():
            os.environ["RESUME"] = "auto"  # a script may have asked for another start, and have a checkpoint
    if script.is_set():
        with contextlib.suppress(OSError):  # removed only if the script has written nothing
            Path(os.environ["RUN_DIR"]).rmdir()
    return status


def make_job(args: Namespace, elastic: tuple[int, int] | None) -> LocalJob:
    """Return the job, whose nodes have not started; name the run of an elastic recipe, which a restart resumes."""
    job, is_named = LocalJob(), bool(read_option("--name", "", args.options))
    if elastic:
        if not script.is_set() and not is_named:
            args.options = ["--name", name_run(args.recipe), *args.options]
        words = f"--name {read_option('--name', '', args.options)} --resume auto"
        if script.is_set():
            words = f"NAME={Path(os.environ['RUN_DIR']).name} RESUME=auto"
        address = args.networks[-1][1] if args.networks else "127.0.0.1"
        job = ElasticJob(*elastic, address, f"to resume: the same command with {words}")
    job.how_to_resume = args.how_to_resume = how_to_resume(args, is_named)  # also of a next port's job
    if not script.is_set():  # a recipe ends its step first, and ends by itself if a rank waits for --timeout-s
        with contextlib.suppress(ValueError):  # the recipe refuses it
            job.stop_grace_s += 2 * float(read_option("--timeout-s", "300", args.options))
    return job


def run_job(job: LocalJob, args: Namespace, shares: list[list[str]], processes: int) -> int:
    """Start a node for each share of the GPUs, wait until they have ended, and return the job's exit status."""
    nodes, port = len(shares), free_port()
    job.handle_signals()
    with temporary_folder() as scratch:  # killed nodes leave files there
        for node in range(nodes):
            environment = node_environment(node, nodes, processes, shares[node], port) | {"TMPDIR": scratch}
            prefix = []
            if args.networks:
                environment |= {"MASTER_ADDR": args.networks[0][1], "GLOO_SOCKET_IFNAME": "eth0"}
                prefix = ["nsenter", f"--net=/run/netns/{args.networks[node][0]}", "--"]
            job.start([*prefix, "scripts/launch.sh", args.recipe, *args.options], environment)
        return job.wait()


if __name__ == "__main__":
    sys.exit(main())
