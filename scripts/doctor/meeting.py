"""How the nodes of a job meet: node 0 listens at MASTER_ADDR:MASTER_PORT, the others connect and do what it asks.

Lines of JSON over TCP. Both sides first prove that they know the job's word (RDZV_ID) without sending it. Node 0
gives orders {"do": ..., ...} to all nodes at once, itself among them, and each answer has a bound: a node that is
late is lost, and the order at which it was lost is kept for the rules. It is not torch's TCPStore, because a torch
that does not work is a finding, and because a TCPStore serves anyone who connects.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from recipes.common.errors import UserError
from recipes.common.process.meeting import MissingNodeError
from recipes.common.process.node import Node
from scripts.doctor.network import call_within
from scripts.launch.echo import CONNECT_TIMEOUT_S, mac
from scripts.launch.interface import resolve

MAX_LINE_BYTES = 16 * 1024 * 1024
"""An answer holds a node's facts, some kilobytes a node."""

MAX_REFUSED = 64

SILENCE_S = 150.0
"""How long a node may hear nothing from node 0 once all are there: longer than the whole examination."""

Answer = dict[str, Any]


class Channel:
    """Lines of JSON to and from one node."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = connection.makefile("rb")

    def send(self, message: Answer) -> None:
        """Send a message; raises OSError."""
        self.connection.settimeout(CONNECT_TIMEOUT_S)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> Answer:
        """Return the next message.

        Raises:
            OSError: it does not come within the bound, or the connection is lost; ValueError: it is none.
        """
        self.connection.settimeout(timeout_s)
        try:
            line = call_within(lambda: self.lines.readline(MAX_LINE_BYTES), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None
        if not line:
            raise ConnectionError("it has closed the connection")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("no message of a doctor")
        return message

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes a reader
        self.connection.close()


def introduce(channel: Channel, place: Node, word: str) -> str:
    """As a node, introduce yourself to node 0, which has to prove itself as well; return why it refuses, or "".

    Raises:
        OSError, ValueError, KeyError, TypeError: whoever answers is not node 0 of this job.
    """
    nonce, own = channel.receive(CONNECT_TIMEOUT_S)["nonce"], os.urandom(16).hex()
    proof = mac(word, f"node {nonce} {own} {place.node_rank} {place.nnodes}".encode()).hex()
    hello = {"rank": place.node_rank, "nnodes": place.nnodes, "nonce": own, "mac": proof}
    channel.send({**hello, "time": time.time()})
    reply = channel.receive(CONNECT_TIMEOUT_S)
    if "refusal" in reply:
        return str(reply["refusal"])
    if not hmac.compare_digest(reply["mac"], mac(word, f"head {own}".encode()).hex()):
        raise ValueError("it does not know this job's word")
    return ""


def join(place: Node, word: str, timeout_s: float) -> Channel:
    """Return a channel to node 0, which may come up within the bound.

    Raises:
        MissingNodeError: its name is unknown, nobody came, or somebody else did.
        UserError: node 0 refuses this node, and has made its report now.
    """
    deadline = time.monotonic() + timeout_s
    _, address = resolve(place.master_addr, int(timeout_s))
    at = f"{place.master_addr}:{place.master_port}"
    while True:
        channel = None
        try:
            connection = socket.create_connection((address[0], place.master_port), timeout=CONNECT_TIMEOUT_S)
            channel = Channel(connection)
            refusal = introduce(channel, place, word)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = "another program answers there" if channel else getattr(error, "strerror", None) or "no answer"
            if channel:
                channel.close()
        else:
            if not refusal:
                return channel
            with contextlib.suppress(OSError, ValueError):  # else a launcher would end node 0 with this one
                channel.receive(place.rdzv_timeout_s + SILENCE_S)
            fix = "see the RDZV_ID, NNODES and NODE_RANK of all nodes"
            raise UserError(f"node 0 at {at} has turned it away: {refusal}; {fix}")
        if time.monotonic() > deadline:
            fix = "is it up, is MASTER_ADDR right, does a firewall drop the port"
            raise MissingNodeError(f"node 0 does not answer at {at}: {why}; {fix}")
        time.sleep(0.2)


@dataclass
class Meeting:
    """Node 0's side: who is there, and how to ask all."""

    word: str
    nnodes: int
    carry_out: Callable[[Answer], Answer]
    """Node 0's own part of an order."""
    channels: dict[int, Channel] = field(default_factory=dict)
    clocks: dict[int, tuple[float, float]] = field(default_factory=lambda: {0: (0.0, 0.0)})
    """By how many seconds each node is ahead of node 0 as it comes, and how far off that may be."""
    lost: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By rank: the order during which a node was lost, and why."""
    refused: list[tuple[int, str]] = field(default_factory=list)
    """A node that was rejected: the rank that it claims, and why."""
    waiting: list[Channel] = field(default_factory=list)
    """Their channels, open until the report is out."""
    door: threading.Lock = field(default_factory=threading.Lock)
    is_closed: bool = False

    def gather(self, listener: socket.socket, timeout_s: float, say: Callable[[str], None]) -> None:
        """Let the other nodes in until all are there, or until the bound."""
        deadline, said_at = time.monotonic() + timeout_s, time.monotonic()
        listener.settimeout(0.2)
        while len(self.channels) < self.nnodes - 1 and (now := time.monotonic()) < deadline:
            if now > said_at + 10:
                missing = [str(rank) for rank in range(1, self.nnodes) if rank not in self.channels]
                say(f"waiting for node {', '.join(missing)}, {deadline - now:.0f} s more at most")
                said_at = now
            with contextlib.suppress(TimeoutError):
                connection, address = listener.accept()
                # A stranger that connects and says nothing must not keep the others at the door.
                arguments = (Channel(connection), str(address[0]))
                threading.Thread(target=self.welcome, args=arguments, daemon=True).start()
        listener.close()
        with self.door:
            self.is_closed = True

    def welcome(self, channel: Channel, address: str) -> None:
        """Let a node in that knows the word and has a number of its own; give others the reason why not."""
        # Of a port scan or a health check we know nothing, and it nothing of us.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            nonce, begin = os.urandom(16).hex(), time.time()
            channel.send({"nonce": nonce})
            hello = channel.receive(CONNECT_TIMEOUT_S)
            half_s = (time.time() - begin) / 2
            offset_s = hello.get("time", begin + half_s) - begin - half_s
            rank, nnodes, own = int(hello["rank"]), hello["nnodes"], hello["nonce"]
            expected = mac(self.word, f"node {nonce} {own} {rank} {nnodes}".encode()).hex()
            with self.door:
                if self.is_closed:
                    raise ConnectionAbortedError
                if not hmac.compare_digest(str(hello["mac"]), expected):
                    reason = "it has another RDZV_ID: it belongs to another job"
                elif nnodes != self.nnodes:
                    reason = f"it has NNODES {nnodes}, node 0 has {self.nnodes}"
                elif rank in self.channels or not 0 < rank < nnodes:
                    reason = f"NODE_RANK {rank} is taken by another node"
                else:
                    channel.send({"mac": mac(self.word, f"head {own}".encode()).hex()})
                    self.clocks[rank] = (offset_s, half_s)
                    self.channels[rank] = channel
                    return
                if len(self.refused) >= MAX_REFUSED:
                    raise ConnectionAbortedError
                self.refused.append((rank, f"{address}: {reason}"))
                self.waiting.append(channel)
            channel.send({"refusal": reason})
            return
        channel.close()

    def ask_all(self, order: Answer, timeout_s: float, keys: Sequence[str] = ()) -> dict[int, Answer]:
        """Return the answers of all nodes that are there, which have these keys; a node without one is lost."""

        def ask(rank: int) -> Answer | None:
            try:
                if rank == 0:
                    answer = answer_to(order, self.carry_out, timeout_s)
                else:
                    self.channels[rank].send(order)
                    answer = self.channels[rank].receive(timeout_s)
                if "failed" in answer:
                    raise ValueError(answer["failed"])
                if missing := [key for key in keys if key not in answer]:
                    raise ValueError(f"its answer has no {', '.join(missing)}")
                return answer
            except (OSError, ValueError) as error:
                self.lost[rank] = (str(order["do"]), str(error) or type(error).__name__)
                if rank:
                    self.channels.pop(rank).close()
                return None

        ranks = [0, *sorted(self.channels)]
        with ThreadPoolExecutor(len(ranks)) as pool:
            answers = zip(ranks, pool.map(ask, ranks), strict=True)
            return {rank: answer for rank, answer in answers if answer is not None}

    def end(self, status: int) -> None:
        """Tell all nodes that it is over, and with which status."""
        for channel in self.channels.values():
            with contextlib.suppress(OSError):
                channel.send({"do": "end", "status": status})
            channel.close()
        for channel in self.waiting:
            channel.close()


def serve(channel: Channel, carry_out: Callable[[Answer], Answer], gathering_s: float) -> int:
    """As a node, carry out node 0's orders until it says end; return the status that it gives.

    Node 0 may wait gathering_s for other nodes before its first order.

    Raises:
        UserError: node 0 is lost.
    """
    try:
        order = channel.receive(gathering_s + SILENCE_S)
        while order["do"] != "end":
            channel.send(answer_to(order, carry_out, SILENCE_S))
            order = channel.receive(SILENCE_S)
        return int(order["status"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"node 0 is lost: {error}; see its own log") from None


def answer_to(order: Answer, carry_out: Callable[[Answer], Answer], timeout_s: float) -> Answer:
    """Return the answer to an order, {"failed": why} where carrying it out fails: node 0 is to report that."""
    try:
        return call_within(lambda: carry_out(order), timeout_s)
    except Exception as error:
        text = " ".join(str(error).split())
        kind = "" if isinstance(error, OSError) and text else type(error).__name__
        return {"failed": f"{kind} {text}".strip()}
