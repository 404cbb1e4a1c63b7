"""Files on a server, read part by part: HTTP(S) by the standard library, s3://, gs:// and the like by fsspec.

Servers are not trusted: sizes are bounded, and shards.py compares checksums. Every read has a time-out, and ends
with its bytes or with an OSError that says what the server did.
"""

from __future__ import annotations

import errno
import functools
import http.client
import inspect
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from recipes.common.errors import LASTING, RefusedError, UserError

READS_IN_FLIGHT = 32
"""Concurrent reads of a process: 32 of 50 ms each are 640 a second, about what a core decodes."""

PART_BYTES = 2**20
"""A longer file is read in parts of this many bytes, several at once."""

RETRY_PAUSES = (0, 0, 1 / 4, 1)
"""Pauses before the attempts at a read, in multiples of an attempt's time-out: in all 47 s by default."""

RETRY_STATUSES = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which another attempt may succeed."""


def printable(text: str) -> str:
    """Return a server's text as one short line without control characters for the terminal."""
    return re.sub(r"[^\x20-\x7e]", "?", " ".join(text.split()))[:200]


class Store(ABC):
    """A folder on a server. All attempts at a read together take less than `timeout_s`, --timeout-s."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.attempt_s, self.longest_s = url, timeout_s / 8, timeout_s * 3 / 4

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raises OSError."""
        return int(self._try(lambda: self._size(name)))

    def read(
        self, name: str, start: int, end: int, is_packed: Callable[[memoryview], bool] = lambda content: True
    ) -> memoryview:
        """Return the bytes of a file from start to before end; raises OSError unless is_packed() accepts them."""

        def read_checked() -> memoryview:
            content = self._read(name, start, end)
            if not is_packed(content):
                raise OSError(errno.EBADMSG, "the server sent other bytes than were packed")
            return content

        # HTTP has no empty ranges.
        return self._try(read_checked) if end > start else memoryview(b"")

    def _try(self, action: Callable[[], Any]) -> Any:
        for pause in RETRY_PAUSES:
            if pause:  # sleep(0) would pass the core on
                time.sleep(pause * self.attempt_s)
            try:
                return action()
            except RefusedError:
                raise
            except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
                reason = printable(getattr(error, "strerror", None) or str(error)) or type(error).__name__
                # A certificate that is not valid is an OSError with errno 1.
                is_lasting = isinstance(error, (ValueError, TypeError)) or getattr(error, "errno", None) in LASTING
                kind = RefusedError if is_lasting else OSError
        raise kind(errno.EIO, f"{reason}, {len(RETRY_PAUSES)} times")

    def result(self, future: Future[Any]) -> Any:
        """Return the result of a read that begin_read() started; raises OSError, also after a time-out."""
        try:
            return future.result(self.longest_s)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"not there after {self.longest_s:g} s") from None

    def results(self, actions: Iterable[Callable[[], Any]]) -> Iterator[Any]:
        """Yield the results of several reads, in order; some of them run at once."""
        yield from map(self.result, [begin_read(action) for action in actions])

    @abstractmethod
    def _size(self, name: str) -> int: ...

    @abstractmethod
    def _read(self, name: str, start: int, end: int) -> memoryview: ...


class HttpStore(Store):
    """A folder on a web server that supports range requests."""

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(url, timeout_s)
        place = urlsplit(url)
        self.server, self.is_encrypted = place.netloc, place.scheme == "https"
        self.folder = quote(place.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self.connections: dict[int, http.client.HTTPConnection] = {}
        """One for each thread. A closed one connects again."""

    def _size(self, name: str) -> int:
        return self._get(name, 0, 1)[1]

    def _read(self, name: str, start: int, end: int) -> memoryview:
        return self._get(name, start, end)[0]

    def _get(self, name: str, start: int, end: int) -> tuple[memoryview, int]:
        """Return the bytes of a file from start to before end, and its size."""
        thread, deadline = threading.get_ident(), time.monotonic() + self.attempt_s
        if thread not in self.connections:
            kind = http.client.HTTPSConnection if self.is_encrypted else http.client.HTTPConnection
            self.connections[thread] = kind(self.server, timeout=self.attempt_s)
        connection = self.connections[thread]
        try:
            headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            connection.request("GET", f"{self.folder}/{quote(name)}", headers=headers)
            response = connection.getresponse()
            size, content = check_answer(response, start, end), memoryview(bytearray(end - start))
            left = content
            source = response if response.chunked else response.fp  # the latter copies once less
            while left:
                if not (count := source.readinto1(left)):
                    raise OSError(errno.EIO, f"the server sent {len(content) - len(left)} bytes of {len(content)}")
                if time.monotonic() > deadline:
                    raise OSError(errno.EIO, f"the server took longer than {self.attempt_s:g} s")
                left = left[count:]
            if response.chunked:  # and more may come
                connection.close()
            response.close()
        except BaseException:
            connection.close()
            raise
        return content, size


def check_answer(response: http.client.HTTPResponse, start: int, end: int) -> int:
    """Return the file's size if a server's answer is the part that was asked for; raises OSError if not."""
    answer = f"the server answered {response.status} {printable(response.reason)}"
    if response.status in RETRY_STATUSES:
        raise OSError(errno.EIO, answer)
    if response.status != 206:
        hint = ": it does not support range requests" if response.status == 200 else ""
        if moved := response.getheader("Location"):
            # Without what would give others access: a password, a signature.
            bare = printable(re.sub(r"//[^/]*@", "//", re.split(r"[?#]", moved)[0]))
            hint = f": it leads to {bare}; give an address that serves the files themselves"
        raise RefusedError(errno.EIO, answer + hint)
    if (coding := response.getheader("Content-Encoding", "identity")) != "identity":
        what = f"the server compresses what it sends ({printable(coding)}), although asked not to"
        raise RefusedError(errno.EIO, f"{what}; turn that off for the shards")
    sent = response.getheader("Content-Range", "")
    part, _, size = sent.rpartition("/")
    is_part = part == f"bytes {start}-{end - 1}" and size.isdecimal()
    if not is_part or response.length not in (None, end - start):
        what = f"{sent[:100]} in {response.length} bytes"
        raise OSError(errno.EIO, f"the server sent {what}, in place of bytes {start}-{end - 1}")
    return int(size)


class FsspecStore(Store):
    """A folder that fsspec reads with one of its packages, which have their own credentials and time-outs."""

    def _size(self, name: str) -> int:
        size = self._call("size", name)
        if size is None:
            raise RefusedError(errno.EIO, "it does not report a size")
        return int(size)

    def _read(self, name: str, start: int, end: int) -> memoryview:
        content = self._call("cat_file", name, start=start, end=end)
        if len(content) != end - start:
            raise OSError(errno.EIO, f"{len(content)} bytes came of {end - start}")
        return memoryview(content)

    def _call(self, method: str, name: str, **values: int) -> Any:
        try:
            return getattr(file_system(self.url.split("://")[0]), method)(f"{self.url}/{name}", **values)
        except (FileNotFoundError, PermissionError) as error:
            number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EACCES
            raise RefusedError(errno.EIO, os.strerror(number)) from None
        except Exception as error:  # each package has errors of its own; after the last attempt they are shown
            name = type(error).__name__
            kind = RefusedError if "Credential" in name else OSError
            raise kind(errno.EIO, f"{name}: {printable(str(error))}") from None


@functools.cache
def file_system(scheme: str) -> Any:
    """Return fsspec's file system for a URL's scheme.

    Raises UserError if the package for it is missing, or needs more than a URL.
    """
    try:
        import fsspec  # type: ignore[import-untyped]

        kind = fsspec.get_filesystem_class(scheme)
        # First: creating an ftp:// file system without a host would also print a traceback when it is collected.
        inspect.signature(kind.__init__).bind(None)
        return kind()
    except Exception as error:  # each package has errors of its own
        reason = printable(str(error)).rstrip(".") or type(error).__name__
        fix = "serve the folder by http:// or https://, or install what fsspec has for it"
        raise UserError(f"--data-dir {scheme}://: {reason}; {fix} (`pip install s3fs`, gcsfs for gs://)") from None


def open_store(url: str, timeout_s: float) -> Store:
    """Return the store for a folder's URL.

    Raises UserError if the URL is invalid or contains secrets, which would be recorded, or a package is missing.
    """
    try:
        place = urlsplit(url)
        is_http = place.scheme in ("http", "https")
        if is_http:
            if not place.hostname:
                raise ValueError("it names no host")
            place.port  # noqa: B018 - raises ValueError
            place.hostname.encode("idna")
    except ValueError as error:
        raise UserError(f"--data-dir: {error}; give http://HOST:PORT/FOLDER") from None
    if "@" in place.netloc or place.query or place.fragment:
        fix = "give the bare address; " + (
            "web servers are read without a login, s3:// and the like with one"
            if is_http
            else "fsspec's packages find credentials by themselves"
        )
        raise UserError(f"--data-dir: a URL with a password, a query or a fragment would be recorded; {fix}")
    if is_http:
        return HttpStore(url, timeout_s)
    file_system(place.scheme)
    return FsspecStore(url, timeout_s)


def begin_read(action: Callable[[], Any]) -> Future[Any]:
    """Begin a read in a thread of this process; Store.result() waits for its result."""
    future: Future[Any] = Future()
    start_readers().put((future, action))
    return future


@functools.cache
def start_readers() -> SimpleQueue[tuple[Future[Any], Callable[[], Any]]]:
    """Start the threads that read, and return their queue; as daemons, they do not keep the process alive."""
    queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def serve() -> NoReturn:
        while True:
            future, action = queue.get()
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

    for _ in range(READS_IN_FLIGHT):
        threading.Thread(target=serve, daemon=True).start()
    return queue
