"""Names in a folder that other nodes write to as well."""

from __future__ import annotations

import contextlib
import os
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
