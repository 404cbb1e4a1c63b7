"""What one node sees of another: whether its names lead to it, its port answers, and large packets come back.

Every node answers at a port of its own that the kernel has chosen, as the ports of gloo and NCCL are chosen, on
the one address that they would use. Who does not know the job's word gets no answer.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

CONNECT_TIMEOUT_S = 3.0
ECHO_TIMEOUT_S = 3.0
NAME_TIMEOUT_S = 5.0

LARGE_BYTES = 256 * 1024
"""Many full packets. Where a path is too narrow for them and nobody says so, small ones pass and these do not."""

MAC_BYTES = 32
PARALLEL = 16


def mac(word: str, text: bytes) -> bytes:
    """Return the proof of knowing the job's word, for a text that is used once."""
    return hmac.digest(word.encode(), text, "sha256")


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes; raises ConnectionError at an early end."""
    parts, missing = [], size
    while missing:
        part = connection.recv(min(missing, 65536))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


class Echo:
    """Send back what a node of this job sends: LARGE_BYTES after a small greeting."""

    def __init__(self, address: str, word: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.word = word
        self.listener = socket.socket(family)
        self.listener.bind((address, 0))
        self.listener.listen(128)
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        """Answer until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        """Answer one connection, for a bounded time."""
        with connection, contextlib.suppress(OSError):
            connection.settimeout(CONNECT_TIMEOUT_S + ECHO_TIMEOUT_S)
            greeting = read_exactly(connection, 16 + MAC_BYTES)
            if not hmac.compare_digest(greeting[16:], mac(self.word, greeting[:16])):
                return
            connection.sendall(mac(self.word, greeting))
            connection.sendall(read_exactly(connection, LARGE_BYTES))

    def close(self) -> None:
        """Stop answering."""
        self.listener.close()


def try_port(address: str, port: int, word: str, greeting: bytes) -> dict[str, Any]:
    """Return how far a connection gets: {"stage": "done"}, or the stage where it ended and why."""
    stage, begin = "connect", time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection:
            stage = "greet"
            message = greeting + mac(word, greeting)
            connection.sendall(message)
            if read_exactly(connection, MAC_BYTES) != mac(word, message):
                return {"stage": stage, "why": "another program answers"}
            latency_ms = (time.monotonic() - begin) * 1000
            stage = "large"
            connection.settimeout(ECHO_TIMEOUT_S)
            sender = threading.Thread(target=send_all, args=(connection, bytes(LARGE_BYTES)), daemon=True)
            sender.start()
            read_exactly(connection, LARGE_BYTES)
            return {"stage": "done", "latency_ms": round(latency_ms, 3)}
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return {"stage": stage, "why": why}


def send_all(connection: socket.socket, data: bytes) -> None:
    """Send; the reader notices a failure."""
    with contextlib.suppress(OSError):
        connection.sendall(data)


def addresses_of(name: str) -> list[str]:
    """Return the addresses that a name has here; raises OSError where it has none or no resolver answers."""
    # getaddrinfo knows no bound: a resolver that does not answer is left to its thread.
    found = call_within(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), NAME_TIMEOUT_S)
    return sorted({str(entry[4][0]).split("%")[0].removeprefix("::ffff:") for entry in found})


def try_names(names: Sequence[str]) -> dict[str, Any]:
    """Return for each name its addresses here, or why there are none."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = addresses_of(name)
        except OSError as error:
            found[name] = f"{getattr(error, 'strerror', None) or error}"
    return found


def look_at_peers(peers: Sequence[dict[str, Any]], word: str, greeting: bytes) -> dict[str, dict[str, Any]]:
    """Return what this node sees of each peer {"rank", "names", "address", "port"}, by the peer's rank."""

    def look(peer: dict[str, Any]) -> dict[str, Any]:
        return {
            "names": try_names(peer["names"]),
            "port": peer["port"],
            **try_port(peer["address"], peer["port"], word, greeting),
        }

    with ThreadPoolExecutor(PARALLEL) as pool:
        return {str(peer["rank"]): found for peer, found in zip(peers, pool.map(look, peers), strict=True)}


def call_within(function: Callable[[], Any], timeout_s: float) -> Any:
    """Return what a function returns; raises TimeoutError at the bound, and leaves it to its thread then."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function).result(timeout_s)
    except FutureTimeoutError:
        raise TimeoutError(f"no end within {timeout_s:.0f} s") from None
    finally:
        pool.shutdown(wait=False)
