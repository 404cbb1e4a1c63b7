r"""One node of an elastic job: run this node's ranks when the coordinator says so, and tell how they ended.

    RDZV_ID=secret MIN_NODES=2 NNODES=4 NODE_RANK=1 MASTER_ADDR=node-a MASTER_PORT=29500 \
        scripts/launch.sh ddp --name mine

scripts/launch.sh calls it where MIN_NODES is set; it calls scripts/launch.sh again, without MIN_NODES, for each
round. NODE_RANK is this node's number; its rank in a round may be another. The coordinator is the one that
COORDINATOR (host:port) names; without it, node 0 runs one at MASTER_ADDR:MASTER_PORT. MAX_RESTARTS (3) bounds the
rounds, RDZV_TIMEOUT_S (300) the wait for nodes and for the coordinator. RDZV_ID is the job's secret.

A node that has lost the coordinator ends its ranks within 5 s and tries to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from recipes.common.entry import USAGE_STATUS
from recipes.common.errors import UserError
from recipes.common.node import read_master, read_number
from recipes.common.parent import LAUNCHER_PID, end_with_launcher, end_with_parent
from recipes.common.signals import STOP_SIGNALS
from scripts.elastic.wire import BEAT_S, NO_SECRET, NODE_SILENCE_S, Message, hang_up, hear, say
from scripts.finished import option

LAUNCH = "scripts/launch.sh"

RETURN_AFTER_S = 3.0
"""How long a lost node stays away: what broke it may need a moment, and the others begin without it."""


@dataclass(frozen=True)
class Settings:
    """What the variables say."""

    number: int
    nnodes: int
    min_nodes: int
    max_restarts: int
    host: str
    port: int
    timeout_s: int
    secret: str
    runs_coordinator: bool


def read_settings() -> Settings:
    """Return what the variables say; raises UserError for what makes no sense."""
    nnodes = read_number("NNODES", 1, at_least=1)
    min_nodes = read_number("MIN_NODES", 1, at_least=1)
    number = read_number("NODE_RANK", 0, at_least=0)
    if min_nodes > nnodes:
        raise UserError(f"MIN_NODES {min_nodes} of NNODES {nnodes}: at most as many as there are")
    host, port = read_master(nnodes)
    outside = os.environ.get("COORDINATOR", "")
    if outside:
        host, _, text = outside.rpartition(":")
        if not host or not text.isdigit():
            raise UserError(f"COORDINATOR wants host:port, got {outside!r}")
        port = int(text)
    if not os.environ.get("RDZV_ID"):
        raise UserError(NO_SECRET)
    return Settings(
        number=number,
        nnodes=nnodes,
        min_nodes=min_nodes,
        max_restarts=read_number("MAX_RESTARTS", 3, at_least=0),
        host=host,
        port=port,
        timeout_s=read_number("RDZV_TIMEOUT_S", 300, at_least=1),
        secret=os.environ["RDZV_ID"],
        runs_coordinator=not outside and number == 0,
    )


def coordinator_command(settings: Settings) -> list[str]:
    """Return the command of a coordinator on this node."""
    command = [sys.executable, "-m", "scripts.elastic.coordinator", "--port", str(settings.port)]
    command += ["--nodes", str(settings.nnodes), "--min-nodes", str(settings.min_nodes)]
    command += ["--max-restarts", str(settings.max_restarts), "--timeout-s", str(settings.timeout_s)]
    return [*command, "--address", settings.host]


def free_port(above: int) -> int:
    """Return the next port that nobody listens at, on any address of this node."""
    for port in range(above + 1, min(above + 1000, 65535)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
    raise UserError(f"no port is free above {above}; choose another MASTER_PORT")


def options_of(options: list[str], is_first: bool) -> list[str]:
    """Return a round's options: from the second on they go on with the run, from its newest checkpoint."""
    if is_first:
        return options
    run = Path(option("--runs-dir", "runs", options)) / option("--name", "", options)
    begun_from = option("--resume", "none", options)
    if begun_from not in ("none", "auto") and not (run / "config.json").exists():
        return [*options, "--no-overwrite"]  # it has not begun yet: from the same checkpoint again
    return [*options, "--resume", "auto"]


class Node:
    """This node's connection and the ranks of the round under way."""

    def __init__(self, settings: Settings, recipe: str, options: list[str]) -> None:
        self.settings, self.recipe, self.options = settings, recipe, options
        self.writer: asyncio.StreamWriter | None = None
        self.ranks: asyncio.subprocess.Process | None = None
        self.watcher: asyncio.Task[None] | None = None
        self.stopping = 0
        """The signal that the ranks are to get, again each second: one that is not listening yet would miss it."""
        self.is_leaving = False
        self.has_ended_ranks = False
        self.last_port = settings.port
        self.round, self.record_before = 0, self.record_time()
        self.agent_was_killed = asyncio.Event()

    def on_signal(self, number: signal.Signals) -> None:
        """Leave the job: pass the signal on, and tell the coordinator not to wait for this node."""
        self.stopping, self.is_leaving = number, True
        if self.writer:
            say(self.writer, type="leaving")
        self.pass_on()

    def pass_on(self) -> None:
        """Send the stop signal to the ranks' agent."""
        if self.stopping and self.ranks and self.ranks.returncode is None:
            self.ranks.send_signal(self.stopping)

    async def beat(self, writer: asyncio.StreamWriter) -> None:
        """Let the coordinator know each second that this node is there; remind the ranks of a signal."""
        while True:
            say(writer, type="beat")
            self.pass_on()
            if self.record_before != (now := self.record_time()):
                say(writer, type="training", round=self.round)
                self.record_before = now
            await asyncio.sleep(BEAT_S)

    def record_time(self) -> int:
        """Return when the run's record was written: rank 0 does so as training begins; 0 on other nodes."""
        run = Path(option("--runs-dir", "runs", self.options)) / option("--name", "", self.options)
        try:
            return (run / "config.json").stat().st_mtime_ns
        except OSError:
            return 0

    def next_port(self) -> int:
        """Return a port for the next round, should this node be its head: not the last one, which may linger."""
        self.last_port = free_port(self.last_port)
        return self.last_port

    async def start(self, message: Message) -> None:
        """Start this node's ranks as a plain job of its own."""
        own = {
            "NNODES": str(message["nnodes"]),
            "NODE_RANK": str(message["node_rank"]),
            "MASTER_ADDR": str(message["master_addr"]),
            "MASTER_PORT": str(message["master_port"]),
            "RDZV_ID": f"{self.settings.secret}.{message['round']}",
            "PORT_IS_CHOSEN": "1",
        }
        inherited = {name: value for name, value in os.environ.items() if name not in ("MIN_NODES", "COORDINATOR")}
        self.has_ended_ranks = False
        self.round, self.record_before = message["round"], self.record_time()
        self.stopping = self.stopping if self.is_leaving else 0
        self.ranks = await asyncio.create_subprocess_exec(
            LAUNCH,
            self.recipe,
            *options_of(self.options, message["round"] == 1),
            env={**inherited, **own, LAUNCHER_PID: str(os.getpid())},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self.watcher = asyncio.create_task(self.watch(self.ranks, message["round"]))

    async def watch(self, ranks: asyncio.subprocess.Process, number: int) -> None:
        """Report how the ranks ended."""
        status = await ranks.wait()
        if -status == self.stopping or self.has_ended_ranks:
            status = 0  # a stop signal met them before they listened; or they were ended from here
        if status < 0:
            self.agent_was_killed.set()
            return
        if self.writer:
            say(self.writer, type="ended", round=number, status=status, port=self.next_port())

    async def end_ranks(self) -> None:
        """Kill this node's ranks: the kernel ends those of an agent that is killed."""
        if self.ranks and self.ranks.returncode is None:
            self.has_ended_ranks = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ranks.pid, signal.SIGKILL)
        if self.watcher:
            await self.watcher

    async def serve(self) -> int:
        """Stay connected with the coordinator until it ends the job; return this node's exit status."""
        begin = time.monotonic()
        while time.monotonic() < begin + self.settings.timeout_s and not self.is_leaving:
            try:
                connecting = asyncio.open_connection(self.settings.host, self.settings.port)
                reader, writer = await asyncio.wait_for(connecting, 3)
            except (OSError, TimeoutError):
                await asyncio.sleep(0.3)
                continue
            self.writer = writer
            status = await self.obey(reader, writer)
            if status is not None:
                return status
            hang_up(writer)
            self.writer = None
            await self.end_ranks()
            await asyncio.sleep(RETURN_AFTER_S)
            begin = time.monotonic()
        if self.is_leaving:
            return 0
        raise UserError(
            f"node {self.settings.number} waited {self.settings.timeout_s} s for the coordinator at "
            f"{self.settings.host}:{self.settings.port}; is node 0 up, and is its address right?"
        )

    async def obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """Do what the coordinator says; return the job's status, or None once it cannot be heard any more."""
        number, host = self.settings.number, socket.gethostname()
        say(writer, type="hello", node=number, host=host, secret=self.settings.secret, port=self.next_port())
        beat = asyncio.create_task(self.beat(writer))
        killed = asyncio.create_task(self.agent_was_killed.wait())
        try:
            while True:
                hearing = asyncio.create_task(hear(reader, NODE_SILENCE_S))
                await asyncio.wait([hearing, killed], return_when=asyncio.FIRST_COMPLETED)
                if killed.done():
                    self.agent_was_killed.clear()
                    print(f"elastic: the agent of node {number} was killed", file=sys.stderr, flush=True)
                    return None  # the others go on without this node, until it comes back
                message = hearing.result()
                if message is None:
                    return None
                if message["type"] == "start":
                    await self.start(message)
                elif message["type"] == "stop":
                    self.stopping = self.stopping or signal.SIGUSR1
                    self.pass_on()
                elif message["type"] == "end-round":
                    await self.end_ranks()
                elif message["type"] == "end-job":
                    await self.end_ranks()
                    return int(message["status"])
        finally:
            beat.cancel()
            killed.cancel()


async def run(recipe: str, options: list[str]) -> int:
    """Take part in a job to its end."""
    settings = read_settings()
    if not option("--name", "", options):
        raise UserError("an elastic job wants a name, by which its rounds go on: add --name")
    node = Node(settings, recipe, options)
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, node.on_signal, number)
    coordinator = None
    if settings.runs_coordinator:
        coordinator = await asyncio.create_subprocess_exec(
            *coordinator_command(settings), start_new_session=True, preexec_fn=end_with_parent
        )
    status = await node.serve()
    return await coordinator.wait() if coordinator else status


def main(argv: list[str]) -> int:
    """Run this node; return its exit status."""
    end_with_launcher()
    try:
        return asyncio.run(run(argv[0], argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE_STATUS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
