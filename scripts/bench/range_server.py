"""A web server for the files of a folder and parts of them, with a delay and planted faults."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Fault = Callable[["Handler", int], bool]
"""Called for each request with its handler and number. Returns True if it has sent the answer itself."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests with a whole file or a range of it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        """Send the file, or the part that the request asks for, after the delay."""
        with self.server.count(self.path) as number:
            time.sleep(self.server.delay_s)
            if not (self.server.fault and self.server.fault(self, number)):
                self.send_part()

    def send_part(self) -> None:
        """Send the file, or its part in a Range header of the form bytes=FIRST-LAST."""
        try:
            with open(self.server.folder / self.path.lstrip("/"), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
                start, end = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(end - start))
                if wanted:
                    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
                self.end_headers()
                self.connection.sendfile(file, start, end - start)
        except FileNotFoundError:
            self.answer(404)

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        """Send a status, headers and content."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class Server(ThreadingHTTPServer):
    """A server for many connections at once, on a free port of 127.0.0.1; it counts requests and their seconds."""

    daemon_threads, request_queue_size = True, 512

    def __init__(self, folder: Path, delay_s: float, fault: Fault | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.delay_s, self.fault = folder, delay_s, fault
        self.lock = threading.Lock()
        self.requests = self.now = self.most = 0  # so far, in progress, and at most at once
        self.busy_s = 0.0
        self.paths: Counter[str] = Counter()

    @contextlib.contextmanager
    def count(self, path: str) -> Iterator[int]:
        """Count a request while the block runs; yield its number."""
        with self.lock:
            self.requests += 1
            self.paths[path] += 1
            number = self.requests
            self.now += 1
            self.most = max(self.most, self.now)
        begin = time.monotonic()
        try:
            yield number
        finally:
            with self.lock:
                self.now -= 1
                self.busy_s += time.monotonic() - begin

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients that are killed close the connection in the middle of an answer."""


@contextlib.contextmanager
def serve(folder: Path, delay_s: float = 0.0, fault: Fault | None = None) -> Iterator[tuple[str, Server]]:
    """Serve a folder while the block runs; yield the URL and the server, which has the counts."""
    with Server(folder, delay_s, fault) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server
        finally:
            server.shutdown()
            thread.join()
