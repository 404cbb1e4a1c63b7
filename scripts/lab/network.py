"""Nodes with a network each on this machine: addresses of their own, links that can be cut, spoilt or narrowed.

Each node is a network namespace behind a bridge, as in slurm_cluster.sh. All of it lives in namespaces of
the command that needs it (the drill, the benchmarks): whatever ends that, the kernel takes everything with it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from recipes.common.errors import UserError
from scripts.launch.local import free_port, node_environment
from scripts.launch.processes import rank_environment, run_side_by_side

SUBNET = "10.79.0"
INSIDE = "NETWORK_INSIDE"
TOOLS = ("ip", "unshare", "nsenter", "mount")


def why_not(narrow: bool = False) -> str:
    """Return why there can be no network namespaces here (narrow: with links of a set rate), "" if there can."""
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
    """Become the same command in namespaces of its own; return if this is it already."""
    if os.environ.get(INSIDE):
        return
    own = ["--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--mount", "--net", "--propagation", "private"]
    os.environ[INSIDE] = "1"
    os.execvp("unshare", ["unshare", *own, sys.executable, "-m", module, *argv])


def call(*words: str) -> None:
    """Run a command that has to work; raises UserError with what it says where it does not."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise UserError(f"cannot set up the nodes' networks: {' '.join(words)}: {said}")


class Network:
    """The nodes' networks; node i has the address 10.79.0.(i + 1) on its eth0."""

    def __init__(self, nodes: int) -> None:
        self.names = [f"n{i}" for i in range(nodes)]
        self.addresses = [f"{SUBNET}.{i + 1}" for i in range(nodes)]
        self.bridge = f"{SUBNET}.254"
        Path("/run/netns").mkdir(exist_ok=True)
        call("mount", "-t", "tmpfs", "-o", "mode=755", "netns", "/run/netns")
        self._answer_names_at_once()
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "br0", "type", "bridge")
        call("ip", "addr", "add", f"{self.bridge}/24", "dev", "br0")
        call("ip", "link", "set", "br0", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            call("ip", "netns", "add", name)
            call("ip", "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            call("ip", "link", "set", f"v{i}", "master", "br0", "up")
            call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            call("ip", "-n", name, "link", "set", "lo", "up")
            call("ip", "-n", name, "link", "set", "eth0", "up")

    def _answer_names_at_once(self) -> None:
        """Let look-ups end without a server, which nobody could reach from here."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {
                "hosts": f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n",
                "resolv.conf": "options timeout:1 attempts:1\n",
            }.items():
                path = Path(folder) / name
                path.write_text(text)
                call("mount", "--bind", str(path), f"/etc/{name}")  # which keeps the file that is deleted

    def option(self) -> str:
        """Return what scripts.launch.local takes as --networks."""
        pairs = [f"{name}={address}" for name, address in zip(self.names, self.addresses, strict=True)]
        return ",".join([*pairs, f"={self.bridge}"])

    def cut(self, node: int) -> None:
        """Take a node's link down."""
        call("ip", "link", "set", f"v{node}", "down")

    def lose(self, node: int, share: float) -> str:
        """Drop a share of what comes to a node and leaves it, at random; return by what."""
        inside = ("ip", "netns", "exec", self.names[node])
        netem = [*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "netem", "loss", f"{share:.0%}"]
        outside = ["tc", "qdisc", "add", "dev", f"v{node}", "root", "netem", "loss", f"{share:.0%}"]
        if not subprocess.run(netem, capture_output=True).returncode:
            call(*outside)
            return "netem"
        for chain in ("INPUT", "OUTPUT"):
            rule = ["-A", chain, "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"]
            call(*inside, "iptables", *rule)
        return "iptables"

    def narrow(self, node: int, rate: str, burst: str = "32kb") -> None:
        """Let only so much through a node's link each way, 20mbit say, after a burst at full speed.

        What is larger than the burst (the kernel hands on 64 kB at once) is cut into packets of 1,500 bytes, which
        costs time of the processor: for a fast link take a burst above that.
        """
        shape = ("root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")
        call("tc", "qdisc", "add", "dev", f"v{node}", *shape)
        call("ip", "netns", "exec", self.names[node], "tc", "qdisc", "add", "dev", "eth0", *shape)

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs in a node's network."""
        return ["nsenter", f"--net=/run/netns/{self.names[node]}", "--", *command]

    def run_ranks(self, command: Sequence[str], nodes: int, threads: int, timeout_s: float) -> list[str]:
        """Run a command as one rank on each of so many nodes until all have ended; return what each has printed.

        Raises:
            RuntimeError: one has failed, or not ended within the bound; the message has its last lines.
        """
        port, commands = free_port(), []
        for rank in range(nodes):
            environment = node_environment(rank, nodes, 1, [], port) | rank_environment(rank, nodes, 1)
            environment |= {
                "MASTER_ADDR": self.addresses[0],
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": str(threads),
            }
            commands.append((self.inside(rank, command), environment))
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            done = run_side_by_side(commands, Path(folder), timeout_s)
        # One that was killed had waited for one that failed by itself.
        for rank, ended in sorted(enumerate(done), key=lambda one: one[1].status < 0):
            if ended.status:
                said = ended.output.strip()[-600:]
                raise RuntimeError(f"rank {rank} of {nodes} ended with status {ended.status}: {said}")
        return [ended.output for ended in done]

    def sent_bytes(self, node: int) -> int:
        """Return what a node has sent by its link so far, as the link's end at the bridge counts it."""
        return int(psutil.net_io_counters(pernic=True, nowrap=False)[f"v{node}"].bytes_recv)

    def restore(self, node: int) -> None:
        """Undo everything that was done to a node's link."""
        inside = ("ip", "netns", "exec", self.names[node])
        call("ip", "link", "set", f"v{node}", "up")
        for command in (
            [*inside, "iptables", "-F"],
            [*inside, "tc", "qdisc", "del", "dev", "eth0", "root"],
            ["tc", "qdisc", "del", "dev", f"v{node}", "root"],
        ):
            subprocess.run(command, capture_output=True)  # which fails where there is nothing to undo


def can_lose() -> bool:
    """Whether packets can be dropped at random: by netem, or by the packet filter."""
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
