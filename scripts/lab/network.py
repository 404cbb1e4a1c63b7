"""Nodes with a network each on this machine: addresses of their own, links that can be cut, lossy or slow.

Each node is a network namespace behind a bridge, as in slurm_cluster.sh. Everything lives in namespaces of the
command that needs it (the drill, the benchmarks): however that command ends, the kernel removes them all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.common.errors import UserError
from recipes.common.process.node import shell_status
from recipes.common.process.parent import end_with_parent
from scripts.launch.local import free_port, node_environment
from scripts.launch.processes import rank_environment, run_side_by_side

SUBNET = "10.79.0"
INSIDE = "NETWORK_INSIDE"
TOOLS = ("ip", "unshare", "nsenter", "mount")

PAYLOAD_SHARE = 1448 / 1514
"""Data per byte that a narrow link counts: 1,448 of the 1,514 bytes of a full packet. An interface's own counters
see what the kernel hands on, up to 64 kB with one header."""


def why_not(narrow: bool = False) -> str:
    """Return why there can be no network namespaces (narrow: with limited link rates) here, or "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"there is no {', '.join(missing)} (packages iproute2, util-linux)"
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    if subprocess.run(command, capture_output=True).returncode:
        return "unshare is not allowed here"
    return "the kernel has no tbf" if narrow and not can_narrow() else ""


def enter(module: str, argv: Sequence[str]) -> None:
    """Run the same command in namespaces of its own and exit with its status; return if already inside."""
    if os.environ.get(INSIDE):
        return
    own = ["--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--mount", "--net", "--propagation", "private"]
    again = ["unshare", *own, sys.executable, "-m", module, *argv]
    # unshare ignores TERM, this process does not: when it ends, the kernel kills unshare and all that is inside.
    inside = subprocess.Popen(again, env={**os.environ, INSIDE: "1"}, preexec_fn=end_with_parent)
    while inside.returncode is None:
        with contextlib.suppress(KeyboardInterrupt):  # the command inside gets it too, and cleans up
            inside.wait()
    sys.exit(shell_status(inside.returncode))


def run_checked(*words: str) -> None:
    """Run a command that must succeed; raises UserError with its error output if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise UserError(f"cannot set up the nodes' networks: {' '.join(words)}: {said}")


class Network:
    """The nodes' networks; node i has the address 10.79.0.(i + 1) on its eth0."""

    def __init__(self, nodes: int) -> None:
        if not os.environ.get(INSIDE):
            raise RuntimeError("this would change the machine's own network and /etc/hosts; call enter() first")
        self.names = [f"n{i}" for i in range(nodes)]
        self.addresses = [f"{SUBNET}.{i + 1}" for i in range(nodes)]
        self.bridge = f"{SUBNET}.254"
        Path("/run/netns").mkdir(exist_ok=True)
        run_checked("mount", "-t", "tmpfs", "-o", "mode=755", "netns", "/run/netns")
        self._answer_names_at_once()
        run_checked("ip", "link", "set", "lo", "up")
        run_checked("ip", "link", "add", "br0", "type", "bridge")
        run_checked("ip", "addr", "add", f"{self.bridge}/24", "dev", "br0")
        run_checked("ip", "link", "set", "br0", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            run_checked("ip", "netns", "add", name)
            run_checked("ip", "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run_checked("ip", "link", "set", f"v{i}", "master", "br0", "up")
            run_checked("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run_checked("ip", "-n", name, "link", "set", "lo", "up")
            run_checked("ip", "-n", name, "link", "set", "eth0", "up")

    def _answer_names_at_once(self) -> None:
        """Make name look-ups end at once: no name server can be reached from here."""
        hosts = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("hosts", hosts), ("resolv.conf", "options timeout:1 attempts:1\n")):
                path = Path(folder) / name
                path.write_text(text)
                run_checked("mount", "--bind", str(path), f"/etc/{name}")  # the mount keeps the deleted file

    def option(self) -> str:
        """Return the value of --networks for scripts.launch.local."""
        pairs = [f"{name}={address}" for name, address in zip(self.names, self.addresses, strict=True)]
        return ",".join([*pairs, f"={self.bridge}"])

    def cut(self, node: int) -> None:
        """Take a node's link down."""
        run_checked("ip", "link", "set", f"v{node}", "down")

    def lose(self, node: int, share: float) -> str:
        """Drop a random share of the packets to and from a node; return the tool in use, netem or iptables."""
        inside = ("ip", "netns", "exec", self.names[node])
        netem = [*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "netem", "loss", f"{share:.0%}"]
        outside = ["tc", "qdisc", "add", "dev", f"v{node}", "root", "netem", "loss", f"{share:.0%}"]
        if not subprocess.run(netem, capture_output=True).returncode:
            run_checked(*outside)
            return "netem"
        for chain in ("INPUT", "OUTPUT"):
            rule = ["-A", chain, "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"]
            run_checked(*inside, "iptables", *rule)
        return "iptables"

    def narrow(self, node: int, mbit: float) -> None:
        """Limit a node's link to a rate in each direction, after a burst at full speed of 2 ms.

        The burst is at least 80 kB: the kernel passes on up to 64 kB and their headers at once. What is larger
        than the burst is cut into packets of 1,500 bytes, which takes the cores five times as long.
        """
        burst = max(80_000, round(mbit * 1e6 / 8 * 2e-3))
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", f"{burst}", "latency", "100ms")
        run_checked("tc", "qdisc", "add", "dev", f"v{node}", *shape)
        run_checked("ip", "netns", "exec", self.names[node], "tc", "qdisc", "add", "dev", "eth0", *shape)

    @contextlib.contextmanager
    def narrowed(self, nodes: int, mbit: float) -> Iterator[None]:
        """Limit the first nodes' links, as narrow() does, while the block runs; then undo all changes to them."""
        try:
            for node in range(nodes):
                self.narrow(node, mbit)
            yield
        finally:
            for node in range(nodes):
                self.restore(node)

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command in a node's network."""
        return ["nsenter", f"--net=/run/netns/{self.names[node]}", "--", *command]

    def run_ranks(self, command: Sequence[str], nodes: int, threads: int, timeout_s: float) -> list[str]:
        """Run a command as one rank on each node; return what each printed; raises RuntimeError if one fails."""
        port, commands = free_port(), []
        own = {"MASTER_ADDR": self.addresses[0], "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": str(threads)}
        for rank in range(nodes):
            environment = node_environment(rank, nodes, 1, [], port) | rank_environment(rank, nodes, 1) | own
            commands.append((self.inside(rank, command), environment))
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            done = run_side_by_side(commands, Path(folder), timeout_s)
        # Report a rank that failed by itself, or aborted, before one that was killed as it waited for that rank.
        for rank, ended in sorted(enumerate(done), key=lambda one: one[1].status == -signal.SIGKILL):
            if ended.status:
                late = f"did not end within {timeout_s:g} s"
                how = late if ended.is_late else f"ended with status {ended.status}"
                raise RuntimeError(f"rank {rank} of {nodes} {how}: {ended.output.strip()[-600:]}")
        return [ended.output for ended in done]

    def sent_bytes(self, node: int) -> int:
        """Return how many bytes a node has sent so far, as counted at the bridge's end of its link."""
        import psutil  # here, as the names of faults are read before .venv exists

        return int(psutil.net_io_counters(pernic=True, nowrap=False)[f"v{node}"].bytes_recv)

    def restore(self, node: int) -> None:
        """Undo all changes to a node's link."""
        inside = ("ip", "netns", "exec", self.names[node])
        run_checked("ip", "link", "set", f"v{node}", "up")
        for command in (
            [*inside, "iptables", "-F"],
            [*inside, "tc", "qdisc", "del", "dev", "eth0", "root"],
            ["tc", "qdisc", "del", "dev", f"v{node}", "root"],
        ):
            subprocess.run(command, capture_output=True)  # fails if there is nothing to undo


def can_lose() -> bool:
    """Whether packets can be dropped at random, by netem or by iptables."""
    return is_possible("tc qdisc add dev lo root netem loss 5%") or is_possible(
        "iptables -A INPUT -m statistic --mode random --probability 0.05 -j DROP"
    )


def can_narrow() -> bool:
    """Whether a link's rate can be limited."""
    return is_possible("tc qdisc add dev lo root tbf rate 10mbit burst 32kb latency 100ms")


def is_possible(command: str) -> bool:
    """Whether a command succeeds in a new network namespace."""
    words = ["unshare", "--net", "sh", "-c", f"ip link set lo up && {command}"]
    return subprocess.run(words, capture_output=True).returncode == 0
