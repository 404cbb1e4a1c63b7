"""Nodes with a network, host name, mounts and limits of their own, on this machine, to plant faults in.

Each node is a network namespace on a bridge; its process also has its own UTS and mount namespace. All are in one
PID namespace: when its first process is killed, the kernel kills every other one. It needs root and iproute2.
"""

import json
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import need_namespaces
from tests.support import Command

SUBNET = "10.78.0"

HEADER = """
set -eu
mkdir -p /run/netns
mount -t tmpfs -o mode=755 netns /run/netns
mount --bind hosts /etc/hosts
mount --bind resolv.conf /etc/resolv.conf
ip link set lo up
ip link add br0 type bridge
ip link set br0 up
"""

NODE = """
ip netns add n{i}
ip link add v{i} type veth peer name eth0 netns n{i}
ip link set v{i} master br0 up
ip -n n{i} addr add {subnet}.{address}/24 dev eth0
ip -n n{i} link set lo up
ip -n n{i} link set eth0 up
"""

FOOTER = """
for ((i = 0; i < {nodes}; i++)); do
    if [[ ! -e start$i ]]; then continue; fi
    nsenter --net=/run/netns/n$i unshare --uts --mount --propagation private \\
        bash -c 'hostname "n$0"; source "start$0"' "$i" >"out$i" 2>&1 &
    pids[i]=$!
done
status=0
for i in "${{!pids[@]}}"; do
    own=0
    wait "${{pids[i]}}" || own=$?
    echo "$own" >"status$i"
done
"""


def require_namespaces():
    """Skip, or fail under REQUIRE=netns, where no such nodes can be made."""
    need_namespaces("tc")


@dataclass
class Report:
    """What the doctor has said on all nodes."""

    statuses: dict[int, int]
    outputs: dict[int, str]
    content: dict

    @property
    def findings(self):
        """Return the lines of node 0's findings."""
        return [line for line in self.outputs[0].splitlines() if line.startswith(("error: ", "warning: "))]

    def rules(self):
        """Return the rules that found something, with the nodes that they name."""
        return sorted((finding["rule"], *finding["nodes"]) for finding in self.content["findings"])


def examine(
    nodes, *options, planted=None, network="", without_name=(), absent=(), env=None, wait_s=5, timeout_s=60
):
    """Run the doctor on so many nodes; return its Report.

    planted: by node, lines of bash that run on it before its doctor. network: lines that run once all networks are
    there. without_name: nodes that no other knows by name. absent: nodes that are never started.
    """
    require_namespaces()
    with tempfile.TemporaryDirectory(prefix="cluster-recipes-") as name:
        folder = Path(name)
        hosts = ["127.0.0.1 localhost"]
        hosts += [f"{SUBNET}.{i + 1} n{i}" for i in range(nodes) if i not in without_name]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        (folder / "runs").mkdir()
        variables = {
            "NNODES": nodes,
            "NPROC_PER_NODE": 1,
            "MASTER_ADDR": "n0",
            "MASTER_PORT": 29500,
            "RDZV_ID": "the-word-of-this-test",
            "RDZV_TIMEOUT_S": wait_s,
            "OMP_NUM_THREADS": 1,
            **(env or {}),
        }
        words = [sys.executable, "-m", "scripts.doctor", "--runs-dir", str(folder / "runs"), *options]
        for i in range(nodes):
            if i in absent:
                continue
            own = [*words, "--json", str(folder / "report.json")] if i == 0 else words
            lines = [f"export {key}={shlex.quote(str(value))}" for key, value in variables.items()]
            lines += [f"export NODE_RANK={i}", (planted or {}).get(i, ""), f"cd {shlex.quote(os.getcwd())}"]
            (folder / f"start{i}").write_text("\n".join([*lines, f"exec {shlex.join(own)}"]) + "\n")
        script = HEADER + "".join(NODE.format(i=i, address=i + 1, subnet=SUBNET) for i in range(nodes))
        script += f"\n{network}\n" + FOOTER.format(nodes=nodes)
        unshare = "unshare --net --uts --ipc --mount --propagation private --pid --fork --kill-child --mount-proc"
        command = Command(*unshare.split(), "bash", "-c", script, cwd=folder)
        done = command.wait(timeout_s)
        assert done.status == 0, done.stderr
        statuses = {i: int((folder / f"status{i}").read_text()) for i in range(nodes) if i not in absent}
        outputs = {i: (folder / f"out{i}").read_text() for i in range(nodes) if i not in absent}
        report = folder / "report.json"
        assert report.exists(), outputs
        assert list((folder / "runs").iterdir()) == [], "the probe of the shared folder is removed"
        return Report(statuses, outputs, json.loads(report.read_text()))
