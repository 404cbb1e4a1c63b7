"""The minimum cost of reading from a web server, and of a new cache: send, receive, write, and check nothing."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Callable

from recipes.common.data.cache import Cache
from recipes.common.data.stores import HttpStore

of_thread = threading.local()


class BareStore(HttpStore):
    """A folder on a web server that is trusted, on a network without faults."""

    def _read(self, name: str, start: int, end: int) -> memoryview:
        if not hasattr(of_thread, "connection"):
            of_thread.connection = http.client.HTTPConnection(self.server)
        headers = {"Range": f"bytes={start}-{end - 1}"}
        of_thread.connection.request("GET", f"{self.folder}/{name}", headers=headers)
        return memoryview(of_thread.connection.getresponse().read())


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
