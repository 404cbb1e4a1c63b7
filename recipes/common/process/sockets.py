"""Where multiprocessing keeps its sockets."""

from __future__ import annotations

import os
import tempfile
from multiprocessing import util

LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")
"""Bytes: Linux takes at most 107 for the path of a socket."""


def choose_socket_folder() -> None:
    """Let multiprocessing keep its sockets in /tmp if TMPDIR is too long for their paths, as Python 3.14 does."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            util.get_temp_dir()  # makes the folder once for this process and its workers
        finally:
            tempfile.tempdir = before
