"""How the nodes of a job meet: node 0 listens at MASTER_ADDR:MASTER_PORT, the others connect and do what it asks.

They exchange lines of JSON over TCP. Both sides first prove that they know the job's secret (RDZV_ID) without
sending it. Node 0 gives orders {"do": ..., ...} to all nodes at once, including itself, and each answer has a time
limit: a node that misses it is lost, and the rules report the order at which it was lost. torch's TCPStore would
not do, because a broken torch is a finding, and because a TCPStore serves anyone who connects.
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from recipes.common.errors import UserError
from recipes.common.process.node import Node
from recipes.common.process.rendezvous_errors import MissingNodeError
from recipes.common.process.threads import begin_in_threads, call_within
from recipes.common.watch.report import list_numbers
from scripts.doctor.case import Case
from scripts.launch.echo import CONNECT_TIMEOUT_S, mac
from scripts.launch.interface import resolve

MAX_LINE_BYTES = 16 * 1024 * 1024
"""Limit of one message; the facts of a node are some kilobytes."""

MAX_HELLO_BYTES = 512
"""Limit of a message before both sides have proved that they know the secret: anyone may connect."""

MAX_REFUSED = 64

SILENCE_S = 150.0
"""How long a node waits for node 0 once all nodes have connected: longer than the whole examination."""

Answer = dict[str, Any]


class Channel:
    """A connection that carries lines of JSON to and from one node."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = connection.makefile("rb")

    def send(self, message: Answer) -> None:
        """Send a message; raises OSError."""
        self.connection.settimeout(CONNECT_TIMEOUT_S)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float, max_bytes: int = MAX_LINE_BYTES) -> Answer:
        """Return the next message; raises OSError if none comes in time, ValueError if it is no JSON object."""
        self.connection.settimeout(timeout_s + 1)  # ends the thread; call_within() has the message, and is first
        line = call_within(lambda: self.lines.readline(max_bytes), timeout_s)
        if not line:
            raise ConnectionError("it has closed the connection")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a message of a doctor")
        return message

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes a reader
        self.connection.close()


def introduce(channel: Channel, this_node: Node, secret: str) -> str:
    """Prove to node 0 that this node knows the secret, and have node 0 do so; return why it refuses, or "".

    Raises OSError, ValueError, KeyError or TypeError if the program that answers is not node 0 of this job.
    """
    nonce, own = channel.receive(CONNECT_TIMEOUT_S, MAX_HELLO_BYTES)["nonce"], os.urandom(16).hex()
    proof = mac(secret, f"node {nonce} {own} {this_node.node_rank} {this_node.nnodes}".encode()).hex()
    hello = {"rank": this_node.node_rank, "nnodes": this_node.nnodes, "nonce": own, "mac": proof}
    channel.send({**hello, "time": time.time()})
    reply = channel.receive(CONNECT_TIMEOUT_S, MAX_HELLO_BYTES)
    if "refusal" in reply:
        return str(reply["refusal"])
    if not hmac.compare_digest(reply["mac"], mac(secret, f"head {own}".encode()).hex()):
        raise ValueError("it does not know the job's secret, RDZV_ID")
    return ""


def join(this_node: Node, secret: str, timeout_s: float) -> Channel:
    """Connect to node 0, which may start within timeout_s, and return the channel.

    Raises MissingNodeError if node 0 does not answer; UserError if it refuses this node, after its report.
    """
    deadline = time.monotonic() + timeout_s
    resolve(this_node.master_addr, int(timeout_s))  # wait until the name is known
    at = f"{this_node.master_addr}:{this_node.master_port}"
    while True:
        channel = None
        try:
            # By name: it may lead to the address of an earlier pod at first.
            place = (this_node.master_addr, this_node.master_port)
            connect = partial(socket.create_connection, place, timeout=CONNECT_TIMEOUT_S)
            connection = call_within(connect, CONNECT_TIMEOUT_S + 1)  # a name server may not answer
            channel = Channel(connection)
            refusal = introduce(channel, this_node, secret)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = "another program answers there" if channel else getattr(error, "strerror", None) or "no answer"
            if channel:
                channel.close()
        else:
            if not refusal:
                return channel
            with contextlib.suppress(OSError, ValueError):  # wait: a launcher would end node 0 with this one
                channel.receive(this_node.rdzv_timeout_s + SILENCE_S)
            fix = "see the RDZV_ID, NNODES and NODE_RANK of all nodes"
            raise UserError(f"node 0 at {at} rejected this node: {refusal}; {fix}")
        if time.monotonic() > deadline:
            fix = "is it up, is MASTER_ADDR right, does a firewall drop the port"
            raise MissingNodeError(f"node 0 does not answer at {at}: {why}; {fix}")
        time.sleep(0.2)


@dataclass
class Coordinator:
    """Node 0's side: the nodes that are present, and how to ask all of them."""

    case: Case  # where clocks, and nodes that were rejected or lost, are noted
    secret: str
    carry_out: Callable[[Answer], Answer]  # carries out an order on node 0 itself
    channels: dict[int, Channel] = field(default_factory=dict)
    waiting: list[Channel] = field(default_factory=list)  # of rejected nodes: open until the report is printed
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_closed: bool = False

    def gather(self, listener: socket.socket, timeout_s: float, say: Callable[[str], None]) -> None:
        """Accept the other nodes until all are present or timeout_s has passed."""
        deadline, said_at = time.monotonic() + timeout_s, time.monotonic()
        listener.settimeout(0.2)
        while len(self.channels) < self.case.nnodes - 1 and (now := time.monotonic()) < deadline:
            if now > said_at + 10:
                missing = [rank for rank in range(1, self.case.nnodes) if rank not in self.channels]
                say(f"waiting for node {list_numbers(missing)}, {deadline - now:.0f} s more at most")
                said_at = now
            with contextlib.suppress(TimeoutError):
                connection, address = listener.accept()
                # In a thread: a client that connects and sends nothing must not block the others.
                arguments = (Channel(connection), str(address[0]))
                threading.Thread(target=self.welcome, args=arguments, daemon=True).start()
        listener.close()
        with self.lock:
            self.is_closed = True

    def welcome(self, channel: Channel, address: str) -> None:
        """Accept a node that knows the secret and has a NODE_RANK of its own; send others the reason if not."""
        # Ignore clients that do not speak the protocol, such as port scans and health checks.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            nonce, sent_at = os.urandom(16).hex(), time.time()
            channel.send({"nonce": nonce})
            hello = channel.receive(CONNECT_TIMEOUT_S, MAX_HELLO_BYTES)
            half_s = (time.time() - sent_at) / 2
            offset_s = hello.get("time", sent_at + half_s) - sent_at - half_s
            rank, nnodes, own = int(hello["rank"]), hello["nnodes"], hello["nonce"]
            expected = mac(self.secret, f"node {nonce} {own} {rank} {nnodes}".encode()).hex()
            with self.lock:
                if self.is_closed:
                    raise ConnectionAbortedError
                if not hmac.compare_digest(str(hello["mac"]), expected):
                    reason = "it has another RDZV_ID: it belongs to another job"
                elif nnodes != self.case.nnodes:
                    reason = f"it has NNODES {nnodes}, node 0 has {self.case.nnodes}"
                elif rank in self.channels or not 0 < rank < nnodes:
                    reason = f"NODE_RANK {rank} is taken by another node"
                else:
                    channel.send({"mac": mac(self.secret, f"head {own}".encode()).hex()})
                    self.case.clocks[rank] = (offset_s, half_s)
                    self.channels[rank] = channel
                    return
                if len(self.case.refused) >= MAX_REFUSED:
                    raise ConnectionAbortedError
                self.case.refused.append((rank, f"{address}: {reason}"))
                self.waiting.append(channel)
            channel.send({"refusal": reason})
            return
        channel.close()

    def ask_all(self, order: Answer, timeout_s: float, keys: Sequence[str] = ()) -> dict[int, Answer]:
        """Send an order to all nodes; return by rank the answers that have these keys. Other nodes are lost."""

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
                self.case.lost[rank] = (str(order["do"]), str(error) or type(error).__name__)
                if rank:
                    self.channels.pop(rank).close()
                return None

        ranks = [0, *sorted(self.channels)]
        asked = begin_in_threads([partial(ask, rank) for rank in ranks], len(ranks))
        answers = {rank: done.result() for rank, done in zip(ranks, asked, strict=True)}
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def end(self, status: int) -> None:
        """Send the final status to all nodes and close their channels."""
        for channel in self.channels.values():
            with contextlib.suppress(OSError):
                channel.send({"do": "end", "status": status})
            channel.close()
        for channel in self.waiting:
            channel.close()


def serve(channel: Channel, carry_out: Callable[[Answer], Answer], gathering_s: float) -> int:
    """Carry out node 0's orders until it sends "end"; return the status that it sends.

    Node 0 may wait gathering_s for other nodes before its first order. Raises UserError if node 0 is lost.
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
    """Carry out an order and return the answer, or {"failed": why} so that node 0 can report it."""
    try:
        return call_within(lambda: carry_out(order), timeout_s)
    except Exception as error:
        text = " ".join(str(error).split())
        kind = "" if isinstance(error, OSError) and text else type(error).__name__
        return {"failed": f"{kind} {text}".strip()}
