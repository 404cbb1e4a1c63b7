"""Files and names in a folder that other nodes read or write as well."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder, none if there is no folder; raises OSError if it cannot be read."""
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def refresh_names(folder: Path) -> None:
    """Let names_in() return what other nodes have just put into a folder, or removed.

    NFS, sshfs and the like remember a folder's names for up to a minute, until this node itself changes it.
    """
    with contextlib.suppress(OSError):  # no folder, or nothing can be written: the reader of names says so
        Path(tempfile.mkdtemp(prefix=".refresh-", dir=folder)).rmdir()


def replace_text(path: Path, text: str) -> None:
    """Write a file that others may read meanwhile: they find all of the text, or what was there before."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
