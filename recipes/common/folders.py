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


def replace_text(path: Path, text: str, flush: bool = False) -> None:
    """Write a file that others may read meanwhile: they find all of the text, or what was there before.

    With flush, this also holds after a power cut.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # Ctrl-C, too
        temporary.unlink(missing_ok=True)
        raise


def identity_of_open(path: Path) -> tuple[int, ...]:
    """Return what distinguishes a file from others that have had its name; on NFS, this asks the server."""
    with open(path, "rb") as file:  # stat() may return what this node remembers
        about = os.fstat(file.fileno())
    return about.st_ino, about.st_mtime_ns, about.st_size


NO_FLUSH_ERRORS = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that cannot flush folders, such as AFS, VirtualBox's, and some of FUSE and SMB."""


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FLUSH_ERRORS:
            raise
    finally:
        os.close(handle)


def open_own(folder: Path) -> int:
    """Open a folder; raises OSError if it is a link, is not this user's, or others can write to it."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    about = os.fstat(file)
    if about.st_uid == os.geteuid() and not about.st_mode & 0o022:
        return file
    os.close(file)
    raise OSError(errno.EPERM, f"others can write to it: make it yours, and chmod go-w {folder}")
