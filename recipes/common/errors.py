"""What a recipe raises for a user's mistake."""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import os
import sys
import traceback
from collections.abc import Iterable, Iterator

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk or a quota without room."""


class UserError(ValueError):
    """An error that the user can fix; the message says in one line what is wrong and how to fix it.

    Args:
        on_every_node: rank 0 may not have this error, so the first rank of each node that has it prints it.
        on_one_rank: this rank has not shared this error: it ends without the others, and prints it unless another
            rank that has it, too, does.
        is_passing: another launch may not have this error, so that the engine may start one.
    """

    status = 2
    """Exit status of a process that ends with this error: 2, which no engine restarts, or 1."""

    def __init__(
        self, message: str, on_every_node: bool = False, on_one_rank: bool = False, is_passing: bool = False
    ) -> None:
        super().__init__(message)
        self.on_every_node = on_every_node
        self.on_one_rank = on_one_rank
        if is_passing:
            self.status = 1


class RefusedError(OSError):
    """A failed read that would fail again: an answer of a server, a wrong checksum."""


LASTING = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.EMFILE, *FULL),
        *(errno.ENOSYS, errno.EOPNOTSUPP, errno.ENXIO, errno.ENODEV),
        *(errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EBADMSG)),  # damage that ext4, XFS and Btrfs find
    }
)
"""Errors of a read or write that somebody has to fix first."""


def os_error_of(error: BaseException | None) -> OSError | None:
    """Return the system's error behind a failed read or write, which torch may have wrapped, if there is one."""
    while error is not None and not (isinstance(error, OSError) and error.errno is not None):
        error = error.__cause__ or error.__context__
    return error


def may_pass(error: BaseException) -> bool:
    """Whether a read or write that failed may succeed in another launch, as after a file server's restart."""
    found = os_error_of(error)
    if not found:
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)  # torch's own
    return not isinstance(found, RefusedError) and found.errno not in LASTING


@contextlib.contextmanager
def as_user_error(verb: str, path: object) -> Iterator[None]:
    """Turn an OSError into a UserError that names the path, the reason and, if the reason shows it, the fix."""
    try:
        yield
    except OSError as error:
        hint = ""
        if error.errno in (errno.EACCES, errno.EPERM):
            user = f"user {os.getuid()} (Kubernetes: by an access point, k8s/README.md)"
            hint = f"; give it to {user}, or name another one"
        elif error.errno == errno.EROFS:
            hint = "; make it writable, or name another one"
        elif error.errno in FULL:
            hint = "; free some space"
        what = f"cannot {verb} {error.filename or path}: {error.strerror or error}{hint}"
        raise UserError(what, is_passing=may_pass(error)) from None


STARTS_PROCESSES = ("_execute_child", "_posix_spawn", "_launch", "spawnv_passfds")
"""The functions in which subprocess and multiprocessing call the system to start a process."""


def lack_of_processes(error: BaseException) -> str:
    """Return what is wrong and the fix if the system refuses a new thread or process; "" for another error."""
    if isinstance(error, BlockingIOError):  # also of a lock, a pipe or a socket
        frames = traceback.walk_tb(error.__traceback__)
        is_lack = any(frame.f_code.co_name in STARTS_PROCESSES for frame, _ in frames)
    else:  # Python's own message, and that of C++
        is_lack = str(error) in ("can't start new thread", "Resource temporarily unavailable")
    if not is_lack:
        return ""
    fix = "raise their limit (ulimit -u, or pids.max of the cgroup), or use fewer processes and --workers"
    return f"cannot start another thread or process; {fix}"


NOT_REPEATABLE = " does not have a deterministic implementation"
"""What torch says, after an operation's name, if --deterministic forbids the operation on this device."""


def explain_unrepeatable(said: str) -> str:
    """Return the operation that --deterministic forbids, and the fix; "" if a message is not about that."""
    line = next((line for line in said.splitlines() if NOT_REPEATABLE in line), "")
    what = f"{line.split(NOT_REPEATABLE)[0]} has no deterministic implementation on this device"
    return f"{what}; use another, or drop --deterministic" if line else ""


def adjust_output() -> None:
    """Let standard output escape characters that its encoding lacks, as standard error does by default.

    Also make each line one write: with PYTHONUNBUFFERED, print() writes a line and its end separately, and the
    lines of ranks that share a pipe would mix.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(write_through=False, line_buffering=True)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return "; did you mean 'X'?" for the closest known word, or an empty string."""
    by_lower_case = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=cutoff)
    return f"; did you mean {by_lower_case[close[0]]!r}?" if close else ""


OTHER_NAMES = {
    **dict.fromkeys(("learning-rate", "base-lr"), "lr"),
    **dict.fromkeys(("fp16", "bf16", "precision", "mixed-precision"), "amp"),
    **dict.fromkeys(("grad-accum", "grad-accum-steps"), "accumulate-steps"),
    **{"bs": "global-batch-size", "wd": "weight-decay", "save-every": "checkpoint-every"},
}
"""Other programs' names for an option, if their spelling is close to no option or to the wrong one."""


def nearest_option(flag: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'X'?" for the option that an unknown one may stand for, or an empty string."""
    name = flag.lstrip("-")
    if not name:  # a lone --
        return "; leave it out"
    other = OTHER_NAMES.get(name.replace("_", "-"), name)
    return nearest(flag.removesuffix(name) + other, known, cutoff=0.6)
