"""One fork server for all of pytest's workers: importing torch and the recipes takes each of them 10 s of a core.

The process that distributes the tests starts the server and writes its address to a file; the server ends with
that process. Workers join it. Without workers, multiprocessing starts a server for the first rank.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

forkserver.set_forkserver_preload(["tests.preload"])
_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def _note(run: str) -> Path:
    return Path(tempfile.gettempdir(), f"fork-server-{run}")


def start(run: str) -> None:
    """Start the server for the workers of a pytest run, if it has not been started yet."""
    if _server._forkserver_pid is None:
        forkserver.ensure_running()
        key = getattr(_server, "_forkserver_authkey", None) or b""  # from Python 3.14 on
        descriptor = os.open(_note(run), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            print(_server._forkserver_address, key.hex(), sep="\n", file=file)
        atexit.register(_note(run).unlink)


def join(run: str) -> None:
    """Make this process fork its ranks from the server of a pytest run, if there is one."""
    if run and _note(run).exists():
        address, key = _note(run).read_text().splitlines()
        _server._forkserver_address, _server._forkserver_authkey = address, bytes.fromhex(key)
        _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the server ends with its starter
        _server.ensure_running = forkserver.ensure_running = resource_tracker.ensure_running
