"""An elastic job's nodes on this machine: a coordinator beside them, and a node that was killed comes back.

`make run RECIPE=ddp NODES=4 MIN_NODES=2 MAX_RESTARTS=3` uses it through scripts/local.py.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time

from recipes.common.parent import LAUNCHER_PID, end_with_parent
from scripts.elastic.node import RETURN_AFTER_S
from scripts.finished import option
from scripts.local import ROOT, STOP_GRACE_S, LocalJob, free_port

LEAVE_S = 15.0
"""How long nodes may take to leave once the coordinator has told them how the job ended."""


class ElasticJob(LocalJob):
    """The nodes and the coordinator, which alone says how the job has ended."""

    def __init__(self, nodes: int, min_nodes: int, max_restarts: int, address: str) -> None:
        super().__init__()
        self.port = free_port()
        command = [sys.executable, "-m", "scripts.elastic.coordinator", "--port", str(self.port)]
        command += ["--listen", address, "--nodes", str(nodes), "--min-nodes", str(min_nodes)]
        command += ["--max-restarts", str(max_restarts)]
        command += ["--timeout-s", os.environ.get("RDZV_TIMEOUT_S") or "300"]
        secret = {"RDZV_ID": secrets.token_hex(16)}
        environment = {**os.environ, **secret, "PORT_IS_CHOSEN": "1"}
        self.own = {"MIN_NODES": str(min_nodes), "COORDINATOR": f"{address}:{self.port}", **secret}
        self.coordinator = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self.name = ""
        self.commands: list[tuple[list[str], dict[str, str]]] = []
        self.returns: dict[int, float] = {}
        """When a node that was killed comes back."""

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start the next node."""
        if not option("--name", "", command):  # the rounds go on with the run of this name
            options = command.index("scripts/launch.sh") + 2
            self.name = self.name or f"{command[options - 1]}-{time.strftime('%Y%m%d-%H%M%S')}"
            command = [*command[:options], "--name", self.name, *command[options:]]
        self.commands.append((command, {**environment, **self.own}))
        self.nodes.append(self.start_node(len(self.nodes)))

    def start_node(self, number: int) -> subprocess.Popen[str]:
        """Start a node, for the first time or again; rank 0 alone uses standard output, on any node."""
        command, environment = self.commands[number]
        node = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, LAUNCHER_PID: str(os.getpid())},
            start_new_session=True,
            preexec_fn=end_with_parent,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        relay = threading.Thread(target=self.relay, args=(number, node), daemon=True)
        relay.start()
        self.relays.append(relay)
        return node

    def relay(self, number: int, node: subprocess.Popen[str]) -> None:
        """Pass on what a node says of errors, marked with its number."""
        assert node.stderr
        for line in node.stderr:
            sys.stderr.write(f"[node {number}] {line}")

    def wait(self) -> int:
        """Wait for the coordinator; bring nodes back that were killed; return the job's status."""
        next_signal = 0.0
        while self.coordinator.poll() is None:
            now = time.monotonic()
            if self.interrupted_by or now > self.stop_deadline:
                break
            if not self.stop_signals:
                self.bring_back(now)
            elif now > next_signal:
                next_signal = now + 1
                for node in self.nodes:
                    node.send_signal(max(self.stop_signals))
            time.sleep(0.05)
        status = self.coordinator.poll()
        if status is not None:
            self.wait_for_nodes()
        self.kill()
        self.coordinator.kill()
        for node in self.nodes:
            node.wait()
        self.coordinator.wait()
        for relay in self.relays:
            relay.join(timeout=1)
        return self.explain(status)

    def bring_back(self, now: float) -> None:
        """Start a node again a moment after it was killed; one that has left by itself stays away."""
        for number, node in enumerate(self.nodes):
            status = node.poll()
            if status is not None and status < 0 and number not in self.returns:
                print(f"[node {number}] killed by {signal.Signals(-status).name}", file=sys.stderr, flush=True)
                self.returns[number] = now + RETURN_AFTER_S
            elif number in self.returns and now > self.returns[number]:
                del self.returns[number]
                self.nodes[number] = self.start_node(number)

    def wait_for_nodes(self) -> None:
        """Let the nodes leave by themselves."""
        deadline = time.monotonic() + LEAVE_S
        while any(node.poll() is None for node in self.nodes) and time.monotonic() < deadline:
            time.sleep(0.02)

    def explain(self, status: int | None) -> int:
        """Return the job's status, with a line where the coordinator has not printed one."""
        if self.interrupted_by:
            print("interrupted; checkpoints so far are whole: add --resume auto to go on", file=sys.stderr)
            return 128 + self.interrupted_by
        if status is None:
            print(f"error: no checkpoint within {STOP_GRACE_S:.0f} s of the signal; killed", file=sys.stderr)
            return 1
        if status < 0:
            print(f"error: the coordinator was killed by {signal.Signals(-status).name}", file=sys.stderr)
            return 128 - status
        return status
