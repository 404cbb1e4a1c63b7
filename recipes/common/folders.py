"""Files and names in a folder that other nodes read or write as well."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import tempfile
from pathlib import Path


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder, none if there is no folder; raises OSError if it cannot be read."""
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


NO_FILE = "it is a pipe, a device or a socket, not a file"


def is_special(path: Path) -> bool:
    """Return whether a path is a pipe, a device or a socket: to read it whole may take for ever."""
    with contextlib.suppress(OSError):  # whoever opens it says why it cannot be read
        return stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR)
    return False


def check_file(path: str | Path) -> None:
    """Raise OSError if is_special(), before something opens the path and waits."""
    if is_special(Path(path)):
        raise OSError(errno.EINVAL, NO_FILE, str(path))


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
