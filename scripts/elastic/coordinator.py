"""Keep a job going while its nodes come and go: rounds, each with the nodes that are there.

    RDZV_ID=secret python -m scripts.elastic.coordinator --port 29500 --nodes 4 --min-nodes 2 --max-restarts 3

Each node runs scripts/elastic/node.py, which connects here, starts scripts/launch.sh when it is told to, and
reports how it ended. A round is a plain job: node ranks from 0, a new port, `--resume auto` from the second one
on. It ends
- when the ranks of all nodes have ended well: the job is done;
- when a node is lost (its connection breaks, or it is silent for 7 s) or its ranks fail: the next round begins
  with the nodes that live;
- when a node comes (back): all ranks are asked for a checkpoint, and the next round begins with it.
A new round counts against --max-restarts, whatever began it. The job ends with an error when fewer than
--min-nodes are there for --timeout-s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import hmac
import ipaddress
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from recipes.common.entry import USAGE_STATUS
from recipes.common.errors import PortTakenError
from recipes.common.node import is_port_chosen
from scripts.elastic.wire import BEAT_S, NO_SECRET, SILENCE_S, Message, hang_up, hear, say

START_WAIT_S = 30.0
"""How long the first round waits for the nodes that are missing once there are enough."""

ERROR_GRACE_S = 2.0
"""How long after the first failure the others may report theirs: the one that came first may not be the cause."""

STOP_GRACE_S = 60.0
"""How long a checkpoint may take; then the round is ended without."""

END_GRACE_S = 10.0
"""How long a node may take to end its ranks, which it kills."""

NEWCOMER_WAIT_S = 2.0
"""How long a newcomer waits for others: nodes that come together cost one round."""

TRAIN_S = 1.0
"""How long a round trains before it is stopped for a newcomer: a step at least is won by each round."""

STRIKES = 2
"""A node whose ranks fail in so many rounds in a row is left out: a rank of it is dead for good."""


@dataclass(eq=False)
class Member:
    """A node that is connected, and what it is known to do."""

    number: int
    host: str
    address: str
    port: int
    writer: asyncio.StreamWriter
    joined: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    gone: bool = False
    leaving: bool = False
    """A stop signal came to this node."""
    status: int | None = None
    """How its ranks ended in the round under way."""
    reported: float = 0.0
    strikes: int = 0

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"


class Coordinator:
    """The nodes of a job and its rounds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.members: dict[int, Member] = {}
        self.changed = asyncio.Event()
        self.rounds = 0
        self.lost: list[str] = []
        self.training_since = 0.0

    def tell(self, text: str) -> None:
        """Print a line about the rounds, beside what the recipe prints."""
        print(f"elastic: {text}", file=sys.stderr, flush=True)

    # ---- connections

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a node's connection to its end."""
        hello = await hear(reader, SILENCE_S)
        is_known = hello and hmac.compare_digest(str(hello.get("secret")).encode(), self.args.secret.encode())
        if not hello or hello.get("type") != "hello" or not is_known:
            hang_up(writer)
            return
        member = Member(
            int(hello["node"]), str(hello["host"]), self.address_of(writer), int(hello["port"]), writer
        )
        before = self.members.get(member.number)
        if before:
            self.drop(before)
        self.members[member.number] = member
        self.changed.set()
        try:
            while not member.gone and (message := await hear(reader, SILENCE_S)):
                self.take(member, message)
        finally:
            self.drop(member)

    def address_of(self, writer: asyncio.StreamWriter) -> str:
        """Return the address from which a node came: others reach it there.

        A node on this machine may have come over the loopback, which means this machine's own name.
        """
        address = str(writer.get_extra_info("peername")[0]).removeprefix("::ffff:")
        return self.args.address if ipaddress.ip_address(address).is_loopback and self.args.address else address

    def take(self, member: Member, message: Message) -> None:
        """Note what a node says."""
        member.heard = time.monotonic()
        if message["type"] == "leaving":
            member.leaving = True
        elif message["type"] == "training" and message["round"] == self.rounds:
            self.training_since = self.training_since or member.heard
        elif message["type"] == "ended" and message["round"] == self.rounds:
            member.status, member.reported = int(message["status"]), member.heard
            member.port = int(message["port"])
        self.changed.set()

    def drop(self, member: Member) -> None:
        """Forget a node that has gone."""
        hang_up(member.writer)
        if not member.gone:
            member.gone = True
            if self.members.get(member.number) is member:
                del self.members[member.number]
            if not member.leaving:
                self.lost.append(str(member))
        self.changed.set()

    async def beat(self) -> None:
        """Let the nodes know each second that the coordinator is there."""
        while True:
            for member in self.members.values():
                say(member.writer, type="beat")
            await asyncio.sleep(BEAT_S)

    async def pause(self) -> None:
        """Wait until something has changed, or for a moment."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), 0.2)
        self.changed.clear()

    # ---- rounds

    async def run(self) -> int:
        """Begin rounds until the job is done or cannot go on; return its exit status."""
        while True:
            members = await self.gather()
            if len(members) < self.args.min_nodes:
                return self.too_few(members)
            asked = await self.run_round(members)
            status = self.judge(members, asked)
            if status is not None:
                return status

    async def gather(self) -> list[Member]:
        """Wait for enough nodes, at the beginning also a while for all; return those that are there."""
        begin = time.monotonic()
        while True:
            waited = time.monotonic() - begin
            there = sorted((m for m in self.members.values() if not m.leaving), key=lambda m: m.number)
            enough = len(there) >= self.args.min_nodes
            if len(there) >= self.args.nodes or waited > self.args.timeout_s:
                return there
            if enough and (self.rounds > 0 or waited > START_WAIT_S):
                return there
            if not enough and self.members and all(m.leaving for m in self.members.values()):
                return there
            await self.pause()

    def too_few(self, members: list[Member]) -> int:
        """Say why the job cannot go on, unless it was told to stop."""
        if any(member.leaving for member in self.members.values()):
            return 0
        names = ", ".join(map(str, members)) or "none"
        lost = f"; lost: {', '.join(dict.fromkeys(self.lost))}" if self.lost else ""
        print(
            f"error: {len(members)} of at least {self.args.min_nodes} nodes within {self.args.timeout_s} s "
            f"(there: {names}{lost}); to go on later: the same command with --resume auto",
            file=sys.stderr,
            flush=True,
        )
        return 1

    async def run_round(self, members: list[Member]) -> bool:
        """Let the nodes train until all have ended; return whether they were asked to, for newcomers."""
        self.rounds, self.training_since = self.rounds + 1, 0.0
        if self.rounds > 1 or len(members) < self.args.nodes:
            self.tell(f"round {self.rounds}: {len(members)} of {self.args.nodes} nodes")
        head = members[0]
        for rank, member in enumerate(members):
            member.status = None
            say(
                member.writer,
                type="start",
                round=self.rounds,
                nnodes=len(members),
                node_rank=rank,
                master_addr=head.address,
                master_port=head.port,
            )
        asked_at: float | None = None
        while not self.is_over(members, asked_at):
            newcomers = [m for m in self.members.values() if m not in members and not m.leaving]
            if asked_at is None and self.is_worth_a_round(newcomers):
                asked_at = time.monotonic()
                self.tell(
                    f"{', '.join(map(str, newcomers))} came: all write a checkpoint, the next round takes it in"
                )
                for member in members:
                    say(member.writer, type="stop")
            await self.pause()
        await self.end_round(members)
        return asked_at is not None

    def is_worth_a_round(self, newcomers: list[Member]) -> bool:
        """Whether a round is to end for nodes that have come, and another round is left."""
        if not newcomers or self.rounds > self.args.max_restarts or not self.training_since:
            return False
        now = time.monotonic()
        have_waited = now > max(member.joined for member in newcomers) + NEWCOMER_WAIT_S
        return have_waited and now > self.training_since + TRAIN_S

    def is_over(self, members: list[Member], asked_at: float | None) -> bool:
        """Whether the round has come to its end, or cannot go on."""
        now = time.monotonic()
        if any(member.gone for member in members) or all(member.status == 0 for member in members):
            return True
        if asked_at is not None and now > asked_at + STOP_GRACE_S:
            return True
        ended = [member for member in members if member.status is not None]
        failed = [member.reported for member in ended if member.status]
        if not failed:
            return bool(ended) and now > min(member.reported for member in ended) + STOP_GRACE_S
        # A node that was cut off has not been heard since: it will be found lost, and then it is the cause.
        return all(m.status is not None or m.heard > min(failed) + ERROR_GRACE_S for m in members)

    async def end_round(self, members: list[Member]) -> None:
        """Let each node kill the ranks that are left, and wait until they have gone."""
        deadline = time.monotonic() + END_GRACE_S
        ending = [member for member in members if member.status is None and not member.gone]
        for member in ending:
            say(member.writer, type="end-round")
        while any(member.status is None and not member.gone for member in ending):
            if time.monotonic() > deadline:
                for member in ending:
                    if member.status is None:
                        self.drop(member)
            await self.pause()
        for member in ending:
            if not member.gone:
                member.status = None  # how they ended says nothing: they were killed

    def judge(self, members: list[Member], asked: bool) -> int | None:
        """Return the job's exit status after a round, or None if there is to be another."""
        gone = [member for member in members if member.gone]
        statuses = [member.status for member in members if not member.gone]
        if not gone and statuses and all(status == 0 for status in statuses):
            for member in members:
                member.strikes = 0
            leaving = [member for member in members if member.leaving]
            going_on = [member for member in self.members.values() if not member.leaving]
            if not asked and (not leaving or len(going_on) < self.args.min_nodes):
                return 0
            return self.count_round(
                "stopped for another node" if asked else f"{', '.join(map(str, leaving))} left"
            )
        failed = [member for member in members if not member.gone and member.status]
        if members and all(member.leaving for member in members):
            return max([1, *(status for status in statuses if status)])
        killed = [member for member in failed if (member.status or 0) >= 128]
        if not gone and not killed and any(member.status == USAGE_STATUS for member in failed):
            return USAGE_STATUS  # it has said why
        if not gone:
            self.strike(members, killed or sorted(failed, key=lambda member: member.reported)[:1])
        why = [f"lost {member}" for member in gone if not member.leaving]
        why += [f"{member} ended with status {member.status}" for member in failed]
        return self.count_round("; ".join(why) or "no answer to the request for a checkpoint")

    def strike(self, members: list[Member], culprits: list[Member]) -> None:
        """Count a node's failures in a row, and leave it out after the second if enough others are there."""
        for member in members:
            member.strikes = member.strikes + 1 if member in culprits else 0
        for member in culprits:
            if member.strikes >= STRIKES and len(self.members) > self.args.min_nodes:
                self.tell(f"{member} is left out: its ranks have failed in {STRIKES} rounds in a row")
                say(member.writer, type="end-job", status=1)
                member.leaving = True  # it is gone for good, and nobody's loss

    def count_round(self, why: str) -> int | None:
        """Return None if another round is left; else say why the job ends, and return 1."""
        self.tell(f"round {self.rounds} ended: {why}")
        if self.rounds <= self.args.max_restarts:
            return None
        print(
            f"error: {why}; that was restart {self.args.max_restarts} of at most {self.args.max_restarts} "
            "(MAX_RESTARTS); to go on: the same command with --resume auto",
            file=sys.stderr,
            flush=True,
        )
        return 1

    async def serve(self) -> int:
        """Listen, run the job, and let all nodes know how it ended."""
        server = await asyncio.start_server(self.welcome, self.args.listen or None, self.args.port)
        beat = asyncio.create_task(self.beat())
        status = await self.run()
        for member in self.members.values():
            say(member.writer, type="end-job", status=status)
        deadline = time.monotonic() + END_GRACE_S
        while self.members and time.monotonic() < deadline:  # until they have hung up
            await self.pause()
        beat.cancel()
        server.close()
        return status


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the coordinator's options."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.elastic.coordinator", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--listen", default="", help="address to listen at (default: all of this machine)")
    parser.add_argument("--address", default="", help="how other nodes reach a node that comes over the loopback")
    parser.add_argument("--nodes", type=int, required=True, help="as many nodes as there are at best")
    parser.add_argument("--min-nodes", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, default=3, help="rounds after the first")
    parser.add_argument("--timeout-s", type=int, default=300, help="longest wait for --min-nodes nodes")
    args = parser.parse_args(argv)
    args.secret = os.environ.get("RDZV_ID", "")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; return its exit status."""
    args = parse(argv)
    if not args.secret:
        print(f"error: {NO_SECRET}", file=sys.stderr)
        return USAGE_STATUS
    try:
        return asyncio.run(Coordinator(args).serve())
    except OSError as error:
        print(f"error: cannot listen at port {args.port}: {error.strerror or error}", file=sys.stderr)
        is_lost_race = error.errno == errno.EADDRINUSE and is_port_chosen()
        return PortTakenError.status if is_lost_race else USAGE_STATUS
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
