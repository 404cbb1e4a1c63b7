"""Nodes with a network, host name, mounts and limits of their own, on this machine, to plant faults in.

    python -m tests.doctor.nodes FOLDER

examine() calls it with the script of each node. The networks are those of scripts/lab/network.py; each node's
process also has its own UTS and mount namespace. It needs root and iproute2.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.lab import network as lab


@dataclass
class Report:
    """The doctor's exit status and output on each node, and the JSON report."""

    statuses: dict[int, int]
    outputs: dict[int, str]
    content: dict

    @property
    def findings(self):
        """Return the lines of node 0's output that are findings."""
        return [line for line in self.outputs[0].splitlines() if line.startswith(("error: ", "warning: "))]

    def rules(self):
        """Return the rule of each finding, with the nodes that it names."""
        return sorted((finding["rule"], *finding["nodes"]) for finding in self.content["findings"])


def examine(nodes, *options, planted=None, network="", without_name=(), absent=(), wait_s=60, timeout_s=0.0):
    """Run the doctor on this many nodes; return its Report.

    planted: by node, lines of bash that run on it before its doctor. network: lines that run once all networks
    exist. without_name: nodes whose name is missing in /etc/hosts. absent: nodes that are never started.
    """
    # Imported here, because main() inside the namespaces needs no torch.
    from tests.conftest import need_namespaces
    from tests.support import TIMEOUT_S, Command

    need_namespaces("tc")
    with tempfile.TemporaryDirectory(prefix="cluster-recipes-") as name:
        folder = Path(name)
        hosts = ["127.0.0.1 localhost"]
        hosts += [f"{lab.SUBNET}.{i + 1} n{i}" for i in range(nodes) if i not in without_name]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        (folder / "runs").mkdir()
        variables = {"NNODES": nodes, "NPROC_PER_NODE": 1, "MASTER_ADDR": "n0", "MASTER_PORT": 29500}
        variables |= {"RDZV_ID": "the-word-of-this-test", "RDZV_TIMEOUT_S": wait_s, "OMP_NUM_THREADS": 1}
        words = [sys.executable, "-m", "scripts.doctor", "--runs-dir", str(folder / "runs"), *options]
        started = {}
        for i in set(range(nodes)) - set(absent):
            own = [*words, "--json", str(folder / "report.json")] if i == 0 else words
            lines = [f"export {key}={shlex.quote(str(value))}" for key, value in variables.items()]
            lines += [f"hostname n{i}", f"export NODE_RANK={i}", (planted or {}).get(i, "")]
            started[i] = "\n".join([*lines, f"cd {shlex.quote(os.getcwd())}", f"exec {shlex.join(own)}"])
        names = "umount /etc/hosts; mount --bind hosts /etc/hosts"
        plan = {"nodes": nodes, "network": f"{names}\n{network}", "started": started}
        (folder / "plan.json").write_text(json.dumps(plan))
        done = Command(sys.executable, "-m", "tests.doctor.nodes", name).wait(timeout_s or TIMEOUT_S, check=True)
        assert list((folder / "runs").iterdir()) == [], "the probe of the shared folder is removed"
        outputs = {i: (folder / f"out{i}").read_text() for i in started}
        assert (folder / "report.json").exists(), outputs
        statuses = {int(i): status for i, status in json.loads(done.stdout).items()}
        return Report(statuses, outputs, json.loads((folder / "report.json").read_text()))


def main(name):
    """Start the nodes, each in its own network, and print their exit statuses."""
    lab.enter("tests.doctor.nodes", [name])
    os.chdir(name)
    plan = json.loads(Path("plan.json").read_text())
    net = lab.Network(plan["nodes"])
    subprocess.run(["bash", "-euc", plan["network"]], check=True)
    own_mounts = ["unshare", "--uts", "--mount", "--propagation", "private", "bash", "-c"]
    started = {}
    for i, script in plan["started"].items():
        with open(f"out{i}", "w") as output:
            command = net.inside(int(i), [*own_mounts, script])
            started[i] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    print(json.dumps({i: process.wait() for i, process in started.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
