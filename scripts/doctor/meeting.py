"""How the nodes of a job meet: node 0 listens at MASTER_ADDR:MASTER_PORT, the others connect and do what it asks.

Lines of JSON over TCP. Both sides first prove that they know the job's word (RDZV_ID) without sending it. Node 0
gives orders {"do": ..., ...} to all nodes at once, itself among them, and each answer has a bound: a node that is
late is lost, and the order at which it was lost is kept for the rules.
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
from typing import Any, cast

from scripts.doctor.network import call_within
from scripts.launch.echo import CONNECT_TIMEOUT_S, mac

MAX_LINE_BYTES = 16 * 1024 * 1024
"""An answer holds a node's facts, some kilobytes a node."""

MAX_REFUSED = 64
CLOCKS_AT_ONCE = 16

Answer = dict[str, Any]


class TurnedAwayError(Exception):
    """Node 0 refuses this node; the message is its reason."""


class Channel:
    """Lines of JSON to and from one node."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = b""

    def send(self, message: Answer) -> None:
        """Send a message."""
        self.connection.settimeout(CONNECT_TIMEOUT_S)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> Answer:
        """Return the next message.

        Raises:
            OSError: it does not come within the bound, or the connection is lost; ValueError: it is none.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {timeout_s:.0f} s")
            self.connection.settimeout(left)
            try:
                part = self.connection.recv(65536)
            except TimeoutError:
                raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None
            if not part:
                raise ConnectionError("it has closed the connection")
            self.buffer += part
            if len(self.buffer) > MAX_LINE_BYTES:
                raise ValueError("a line without end")
        line, self.buffer = self.buffer.split(b"\n", 1)
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("no message of a doctor")
        return message

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.connection.close()


def prove(channel: Channel, word: str, rank: int, nnodes: int) -> None:
    """As a node, introduce yourself to node 0, which has to prove itself as well.

    Raises:
        OSError, ValueError, KeyError: whoever answers is not node 0 of this job.
        TurnedAwayError: it is, and refuses this node.
    """
    nonce = channel.receive(CONNECT_TIMEOUT_S)["nonce"]
    own = os.urandom(16).hex()
    proof = mac(word, f"node {nonce} {own} {rank} {nnodes}".encode()).hex()
    channel.send({"rank": rank, "nnodes": nnodes, "nonce": own, "mac": proof})
    reply = channel.receive(CONNECT_TIMEOUT_S)
    if "refusal" in reply:
        raise TurnedAwayError(str(reply["refusal"]))
    if not hmac.compare_digest(reply["mac"], mac(word, f"head {own}".encode()).hex()):
        raise ValueError("it does not know this job's word")


def connect(
    address: tuple[str, int], word: str, rank: int, nnodes: int, timeout_s: float, worry: Callable[[str], None]
) -> Channel:
    """Return a channel to node 0, which may come up within the bound; call worry(why) at half of it.

    Raises:
        ConnectionError: nobody came, or somebody else did; the message says what was the last try's fate.
        TurnedAwayError: node 0 refuses this node, and has made its report now.
    """
    deadline, half = time.monotonic() + timeout_s, time.monotonic() + timeout_s / 2
    while True:
        channel = None
        try:
            channel = Channel(socket.create_connection(address, timeout=CONNECT_TIMEOUT_S))
            prove(channel, word, rank, nnodes)
            return channel
        except TurnedAwayError:
            assert channel
            with contextlib.suppress(OSError, ValueError):
                channel.receive(timeout_s)
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            if channel:
                channel.close()
            why = getattr(error, "strerror", None) or "no answer"
            if channel:
                why = "another program answers there"
        now = time.monotonic()
        if now > deadline:
            raise ConnectionError(why)
        if now > half:
            worry(why)
            half = deadline
        time.sleep(0.2)


@dataclass
class Meeting:
    """Node 0's side: who is there, and how to ask all."""

    word: str
    nnodes: int
    local: Callable[[Answer], Answer]
    """What carries out node 0's own part of an order."""
    channels: dict[int, Channel] = field(default_factory=dict)
    lost: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By rank: the order during which a node was lost, and why."""
    refused: list[tuple[int, str]] = field(default_factory=list)
    """Who was turned away at the door: the rank that it claims, and why."""
    waiting: list[Channel] = field(default_factory=list)
    """Those who were turned away stay until the report is out: a launcher would end node 0 with them."""

    door: threading.Lock = field(default_factory=threading.Lock)
    is_closed: bool = False

    @property
    def present(self) -> list[int]:
        """Return the nodes that still answer, node 0 among them."""
        return [0, *sorted(self.channels)]

    def gather(self, listener: socket.socket, timeout_s: float, say: Callable[[str], None]) -> None:
        """Let the other nodes in until all are there, or until the bound."""
        begin, said_at = time.monotonic(), time.monotonic()
        while len(self.channels) < self.nnodes - 1:
            now = time.monotonic()
            if now > begin + timeout_s:
                break
            if now > said_at + 10:
                missing = [str(rank) for rank in range(1, self.nnodes) if rank not in self.channels]
                say(f"waiting for node {', '.join(missing)}, {begin + timeout_s - now:.0f} s more at most")
                said_at = now
            listener.settimeout(min(0.2, max(0.05, begin + timeout_s - now)))
            try:
                connection, address = listener.accept()
            except TimeoutError:
                continue
            # A stranger that connects and says nothing must not keep the others at the door.
            arguments = (Channel(connection), str(address[0]))
            threading.Thread(target=self.welcome, args=arguments, daemon=True).start()
        listener.close()
        with self.door:
            self.is_closed = True

    def welcome(self, channel: Channel, address: str) -> None:
        """Let a node in that knows the word and has a number of its own; give others the reason why not."""
        nonce = os.urandom(16).hex()
        try:
            channel.send({"nonce": nonce})
            hello = channel.receive(CONNECT_TIMEOUT_S)
            rank, nnodes, own = hello["rank"], hello["nnodes"], hello["nonce"]
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
                    self.channels[rank] = channel
                    return
                if len(self.refused) >= MAX_REFUSED:
                    raise ConnectionAbortedError
                self.refused.append((int(rank), f"{address}: {reason}"))
                self.waiting.append(channel)
            channel.send({"refusal": reason})
            return
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a port scan or a health check: it knows nothing of us, and we nothing of it
        channel.close()

    def ask(self, rank: int, order: Answer, timeout_s: float, keys: Sequence[str] = ()) -> Answer | None:
        """Return a node's answer, which has these keys; None once it is lost."""
        try:
            if rank == 0:
                answer = answer_to(order, self.local, timeout_s)
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
            return None

    def ask_all(self, order: Answer, timeout_s: float, keys: Sequence[str] = ()) -> dict[int, Answer]:
        """Return the answers of all nodes that are there; close the channel of one that is lost."""
        ranks = self.present
        with ThreadPoolExecutor(len(ranks)) as pool:
            answers = list(pool.map(lambda rank: self.ask(rank, order, timeout_s, keys), ranks))
        self.drop_lost()
        return {rank: answer for rank, answer in zip(ranks, answers, strict=True) if answer is not None}

    def drop_lost(self) -> None:
        """Close the channels of nodes that are lost."""
        for rank in set(self.lost) & set(self.channels):
            self.channels.pop(rank).close()

    def clock_offsets(self, samples: int = 5) -> dict[int, tuple[float, float]]:
        """Return by how many seconds each node's clock is ahead of node 0's, and how far off that may be."""

        def measure(rank: int) -> tuple[float, float]:
            best = (0.0, float("inf"))
            for _ in range(samples):
                begin = time.time()
                answer = self.ask(rank, {"do": "clock"}, 5.0, ["time"])
                half_s = (time.time() - begin) / 2
                if answer is None:
                    break
                if half_s < best[1]:
                    best = (answer["time"] - begin - half_s, half_s)
            return best

        ranks = sorted(self.channels)
        with ThreadPoolExecutor(CLOCKS_AT_ONCE) as pool:
            offsets = dict(zip(ranks, pool.map(measure, ranks), strict=True))
        self.drop_lost()
        return {0: (0.0, 0.0)} | {rank: offset for rank, offset in offsets.items() if rank not in self.lost}

    def ask_end(self, status: int) -> None:
        """Tell all nodes that it is over, and with which status."""
        for channel in self.channels.values():
            with contextlib.suppress(OSError):
                channel.send({"do": "end", "status": status})
            channel.close()
        for channel in self.waiting:
            channel.close()


def serve(channel: Channel, carry_out: Callable[[Answer], Answer], timeout_s: float) -> Answer:
    """As a node, carry out node 0's orders until it says end; return its last message.

    Raises:
        OSError: node 0 is lost.
    """
    while True:
        order = channel.receive(timeout_s)
        if order["do"] == "end":
            return order
        channel.send(answer_to(order, carry_out, timeout_s))


def answer_to(order: Answer, carry_out: Callable[[Answer], Answer], timeout_s: float) -> Answer:
    """Return the answer to an order, {"failed": why} where carrying it out fails: node 0 is to report that."""
    try:
        return cast(Answer, call_within(lambda: carry_out(order), timeout_s))
    except Exception as error:
        text = " ".join(str(error).split())
        kind = "" if isinstance(error, OSError) and text else type(error).__name__
        return {"failed": f"{kind} {text}".strip()}
