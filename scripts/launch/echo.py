"""A port that answers those who know a secret: whether one host reaches another, and not a namesake of it.

Both sides prove that they know the secret, and neither sends it. Under mpirun, rank 0 generates it and MPI carries
it to the others; the doctor's nodes use RDZV_ID.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import threading
import time
from typing import Any

CONNECT_TIMEOUT_S = 3.0
ECHO_TIMEOUT_S = 3.0

LARGE_BYTES = 256 * 1024
"""Enough for many full packets: where a path's MTU is too small and no error says so, only small packets pass."""

GREETING_BYTES, MAC_BYTES = 16, 32


def mac(secret: str, text: bytes) -> bytes:
    """Return the proof of knowing the secret (HMAC-SHA256) for a text, which must be used only once."""
    return hmac.digest(secret.encode(), text, "sha256")


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes; raises ConnectionError if the connection ends earlier."""
    parts, missing = [], size
    while missing:
        part = connection.recv(min(missing, 65536))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket at an address ("": all) and a port (0: the kernel chooses one); raises OSError."""
    is_dual = not address and socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if is_dual or ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_dual:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # IPv4, too
    listener.bind((address, port))
    listener.listen(4096)
    return listener


class Echo:
    """A server at a port (0: the kernel chooses one) of an address ("": all) that sends LARGE_BYTES back."""

    def __init__(self, address: str, secret: str, port: int = 0) -> None:
        self.secret = secret
        self.listener = listen(address, port)
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        """Answer until the listener is closed; while this process has too many files open, wait."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    return
                time.sleep(0.05)
                continue
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        """Answer one connection, for a bounded time; the other side closes first, which frees the port at once."""
        with connection, contextlib.suppress(OSError):
            connection.settimeout(CONNECT_TIMEOUT_S + ECHO_TIMEOUT_S)
            greeting = read_exactly(connection, GREETING_BYTES + MAC_BYTES)
            if not hmac.compare_digest(greeting[GREETING_BYTES:], mac(self.secret, greeting[:GREETING_BYTES])):
                return
            connection.sendall(mac(self.secret, greeting))
            connection.sendall(read_exactly(connection, LARGE_BYTES))

    def close(self) -> None:
        """Stop answering, and free the port."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self.listener.close()


def try_port(address: str, port: int, secret: str, size: int = LARGE_BYTES) -> dict[str, Any]:
    """Return {"stage": "done"} and the latency, or the stage at which a connection to an Echo failed and why.

    `size` is the number of bytes that the Echo is to send back, LARGE_BYTES or 0.
    """
    stage, begin = "connect", time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection:
            stage, greeting = "greet", os.urandom(GREETING_BYTES)
            message = greeting + mac(secret, greeting)
            connection.sendall(message)
            if not hmac.compare_digest(read_exactly(connection, MAC_BYTES), mac(secret, message)):
                return {"stage": stage, "why": "another program answers"}
            latency_ms = (time.monotonic() - begin) * 1000
            stage = "large"
            connection.settimeout(ECHO_TIMEOUT_S)
            threading.Thread(target=send_all, args=(connection, bytes(size)), daemon=True).start()
            read_exactly(connection, size)
            return {"stage": "done", "latency_ms": round(latency_ms, 3)}
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return {"stage": stage, "why": why}


def send_all(connection: socket.socket, data: bytes) -> None:
    """Send the data; an error shows up in the thread that reads."""
    with contextlib.suppress(OSError):
        connection.sendall(data)
