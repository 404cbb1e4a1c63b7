"""Files on a server, read part by part: HTTP(S) by the standard library, s3://, gs:// and the like by fsspec.

Nothing that a server says is trusted further than its bytes: sizes are bounded, and shards.py compares checksums.
Every read has a bound, and ends in its bytes or in an OSError that says what the server did.
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from recipes.common.errors import UserError

READS_IN_FLIGHT = 32
"""Of a process: 32 reads of 50 ms are 640 in a second, more than a core decodes."""

PART_BYTES = 2**20
"""A longer file is read in parts of so many bytes, several at once."""

ADDRESS = "http://HOST:PORT/FOLDER"

PAUSES = (0, 0, 1 / 16, 1 / 4)
"""Before each attempt at a read, in times of an attempt's bound."""

NUMBERS = r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})"
"""What a Content-Range says: the first byte, the last one and the file's size."""

AGAIN = (408, 429, 500, 502, 503, 504)
"""What servers answer that may answer otherwise in a moment."""


def printable(text: str) -> str:
    """Return text of a server's as one short line that no terminal takes for commands."""
    return re.sub(r"[^\x20-\x7e]", "?", " ".join(text.split()))[:200]


class RefusedError(OSError):
    """An answer that another attempt would not change."""


class Store(ABC):
    """A folder on a server.

    Args:
        url: of the folder.
        timeout_s: longest wait for another rank; all attempts at a read together take less.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.attempt_s, self.longest_s = url, timeout_s / 8, timeout_s * 3 / 4

    def size(self, name: str) -> int:
        """Return the bytes of a file; raises OSError."""
        return int(self._try(lambda: self._size(name)))

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from start to before end; raises OSError."""
        return bytes(self._try(lambda: self._read(name, start, end)))

    def _try(self, action: Callable[[], Any]) -> Any:
        for pause in PAUSES:
            time.sleep(pause * self.attempt_s)
            try:
                return action()
            except RefusedError:
                raise
            except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
                reason = printable(getattr(error, "strerror", None) or str(error)) or type(error).__name__
        raise OSError(errno.EIO, f"{reason}, {len(PAUSES)} times")

    def result(self, future: Future[Any]) -> Any:
        """Return what a reader's read gives; raises OSError at the bound, too."""
        try:
            return future.result(self.longest_s)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"not there after {self.longest_s:g} s") from None

    def results(self, action: Callable[..., Any], calls: list[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield what several reads give, some of them at once."""
        futures = [readers(os.getpid()).submit(action, *values) for values in calls]
        yield from map(self.result, futures)

    @abstractmethod
    def _size(self, name: str) -> int: ...

    @abstractmethod
    def _read(self, name: str, start: int, end: int) -> bytes: ...


class HttpStore(Store):
    """A folder on a web server that answers requests for parts of a file."""

    def _size(self, name: str) -> int:
        return self._get(name, 0, 1)[1]

    def _read(self, name: str, start: int, end: int) -> bytes:
        return self._get(name, start, end)[0]

    def _get(self, name: str, start: int, end: int) -> tuple[bytes, int]:
        """Return bytes of a file and its size, by this thread's connection; it is kept unless something failed."""
        place, deadline = urlsplit(self.url), time.monotonic() + self.attempt_s
        connection = CONNECTIONS.idle.pop(self.url, None)
        while CONNECTIONS.idle:  # those of servers that this thread has left
            CONNECTIONS.idle.popitem()[1].close()
        if connection is None:
            kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
            connection = kind(place.netloc, timeout=self.attempt_s)
        try:
            headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            folder = quote(place.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
            connection.request("GET", f"{folder}/{quote(name)}", headers=headers)
            response = connection.getresponse()
            size = self._check(response, start, end)
            parts, missing = [], end - start
            while missing:
                part = response.read1(min(missing, PART_BYTES))
                if not part:
                    raise OSError(errno.EIO, f"the server sent {end - start - missing} bytes of {end - start}")
                if time.monotonic() > deadline:
                    raise OSError(errno.EIO, f"the server took longer than {self.attempt_s:g} s")
                parts.append(part)
                missing -= len(part)
            if response.length == 0:
                response.close()
                CONNECTIONS.idle[self.url] = connection
        finally:
            if self.url not in CONNECTIONS.idle:
                connection.close()
        return b"".join(parts), size

    def _check(self, response: http.client.HTTPResponse, start: int, end: int) -> int:
        """Return the file's size where the answer is that part of it."""
        answer = f"the server answered {response.status} {printable(response.reason)}"
        if response.status in AGAIN:
            raise OSError(errno.EIO, answer)
        if response.status != 206:
            hints = {200: ": it does not know range requests", 404: ""}
            raise RefusedError(errno.EIO, answer + hints.get(response.status, told_to(response)))
        sent = re.fullmatch(NUMBERS, response.getheader("Content-Range", ""), re.ASCII)
        if (
            not sent
            or (int(sent[1]), int(sent[2]) + 1) != (start, end)
            or response.length not in (None, end - start)
        ):
            what = f"{response.getheader('Content-Range', '')[:100]} in {response.length} bytes"
            raise OSError(errno.EIO, f"the server sent {what}, in place of bytes {start}-{end - 1}")
        return int(sent[3])


def told_to(response: http.client.HTTPResponse) -> str:
    """Return what to do where a server names another address, without what would let others read there."""
    moved = response.getheader("Location", "")
    bare = printable(re.sub(r"//[^/]*@", "//", re.split(r"[?#]", moved)[0]))
    if "?" in moved:
        return f": it leads to a signed address, {bare}; serve the files themselves"
    return f": give the address that it names, {bare}" if moved else ""


class FsspecStore(Store):
    """A folder that a package below fsspec knows, which has its own credentials and time-outs."""

    def _size(self, name: str) -> int:
        size = self._call("size", name)
        if size is None:
            raise RefusedError(errno.EIO, "it gives no size")
        return int(size)

    def _read(self, name: str, start: int, end: int) -> bytes:
        content = self._call("cat_file", name, start=start, end=end)
        if len(content) != end - start:
            raise OSError(errno.EIO, f"{len(content)} bytes came of {end - start}")
        return bytes(content)

    def _call(self, method: str, name: str, **values: int) -> Any:
        try:
            system = file_system(self.url.split("://")[0])
            return getattr(system, method)(f"{self.url}/{name}", **values)
        except (FileNotFoundError, PermissionError) as error:
            number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EACCES
            raise RefusedError(errno.EIO, os.strerror(number)) from None
        except Exception as error:  # each package has errors of its own; after the last attempt they are shown
            raise OSError(errno.EIO, f"{type(error).__name__}: {printable(str(error))}") from None


class Connections(threading.local):
    """That of each thread that waits for another request, by its URL."""

    def __init__(self) -> None:
        self.idle: dict[str, http.client.HTTPConnection] = {}


CONNECTIONS = Connections()


@functools.cache
def file_system(scheme: str) -> Any:
    """Return fsspec's file system for a kind of URL.

    Raises:
        UserError: the package for it is missing, or it requires more than a URL.
    """
    try:
        import fsspec  # type: ignore[import-untyped]

        kind = fsspec.get_filesystem_class(scheme)
        # First: an ftp:// without its host prints a traceback as it is collected, too.
        inspect.signature(kind.__init__).bind(None)
        return kind()
    except Exception as error:  # each package has errors of its own
        reason = printable(str(error)).rstrip(".") or type(error).__name__
        fix = "serve the folder by http:// or https://"
        if isinstance(error, ImportError | ValueError):
            fix = (
                "http:// and https:// need no package, "
                "others the one that fsspec has for them (`pip install s3fs` for s3://, gcsfs for gs://)"
            )
        raise UserError(f"--data-dir {scheme}://: {reason}; {fix}") from None


def open_store(url: str, timeout_s: float) -> Store:
    """Return the folder of a URL.

    Raises:
        UserError: a URL with what would be recorded and should not, or a package is missing.
    """
    try:
        place = urlsplit(url)
    except ValueError as error:
        raise UserError(f"--data-dir: {error}; give {ADDRESS}") from None
    if "@" in place.netloc or place.query or place.fragment:
        fix = "give the bare address; fsspec's packages find credentials by themselves"
        raise UserError(f"--data-dir: a URL with a password, a query or a fragment would be recorded; {fix}")
    if place.scheme in ("http", "https"):
        try:
            if not place.hostname:
                raise ValueError("it names no host")
            place.port  # noqa: B018 - raises ValueError
            place.hostname.encode("idna")
        except ValueError as error:
            raise UserError(f"--data-dir {url}: {error}; give {ADDRESS}") from None
        return HttpStore(url, timeout_s)
    file_system(place.scheme)
    return FsspecStore(url, timeout_s)


class Readers:
    """Threads of this process that read ahead; they are daemons, so that a process ends while they wait."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self.locks = [threading.Lock() for _ in range(2 * READS_IN_FLIGHT)]
        for _ in range(READS_IN_FLIGHT):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> NoReturn:
        while True:
            future, action = self.queue.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

    def submit(self, action: Callable[..., Any], *values: Any) -> Future[Any]:
        """Call action(*values) in one of the threads."""
        future: Future[Any] = Future()
        self.queue.put((future, functools.partial(action, *values)))
        return future


@functools.cache
def readers(pid: int) -> Readers:
    """Return the threads of this process."""
    return Readers()
