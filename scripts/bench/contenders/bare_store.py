"""The minimum cost of reading from a web server, and of a new cache: send, receive, write, and check nothing."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from recipes.common.data.cache import Cache
from recipes.common.data.stores import HttpStore

HEAD_BYTES = 4096
"""More than the head of an answer has."""

of_thread = threading.local()


class BareStore(HttpStore):
    """A folder on a web server that is trusted, on a network without faults."""

    def _read(self, name: str, start: int, end: int) -> memoryview:
        place = urlsplit(self.url)
        if not hasattr(of_thread, "socket"):
            of_thread.socket = socket.create_connection((place.hostname, place.port), self.attempt_s)
        path = f"{place.path}/{name}"
        request = f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\nRange: bytes={start}-{end - 1}\r\n\r\n"
        of_thread.socket.sendall(request.encode())
        answer, count, head = bytearray(HEAD_BYTES + end - start), 0, -1
        while head < 0 or count < head + end - start:
            received = of_thread.socket.recv_into(memoryview(answer)[count:])
            assert received, "the server has closed the connection"
            count += received
            if head < 0 and (found := answer.find(b"\r\n\r\n", 0, min(count, HEAD_BYTES))) >= 0:
                head = found + 4
        return memoryview(answer)[head:count]


class BareCache(Cache):
    """Files that get all that is read, and that nobody looks at."""

    def look(self, name: str, start: int, end: int) -> bytes:
        """Return nothing, as from a new cache."""
        return b""

    def read(
        self, name: str, start: int, end: int, is_packed: Callable[[memoryview], bool] = lambda content: True
    ) -> memoryview:
        """Return the bytes of the store, and write them."""
        content = self.store.read(name, start, end)
        with self._open(name) as file:
            os.pwrite(file, content, start)
        return content
