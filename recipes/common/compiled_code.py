"""--compile: torch's compiler, and the folder in which it keeps code, and from which it runs whatever it finds."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.runtime_utils import default_cache_dir

from recipes.common.errors import UserError


def check_compiler(device: torch.device) -> None:
    """Raise UserError as check_folder(), or if a CPU's model has no C++ compiler; most GPUs' models need none."""
    check_folder()
    try:
        if device.type == "cpu":
            get_cpp_compiler()
    except InvalidCxxCompiler:
        fix = "install g++, set CXX to a C++ compiler, or drop --compile"
        raise UserError(f"--compile: {socket.gethostname()} has no C++ compiler; {fix}") from None


def check_folder() -> None:
    """Make the folder, unless it is there: its name, torchinductor_USER in the temporary folder, can be guessed.

    torch also keeps headers there if TORCHINDUCTOR_CACHE_DIR names another folder, and does not check whose it is.

    Raises UserError if it is another user's, or everyone can write to it.
    """
    folder = Path(default_cache_dir())
    fix = "or set TMPDIR to a folder of yours"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except FileExistsError:
        raise UserError(f"--compile: {folder} is a file; remove it, {fix}") from None
    except OSError as error:
        raise UserError(f"--compile: cannot make {folder} ({error.strerror}); make room, {fix}") from None
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise UserError(
            f"--compile: {folder}, which holds compiled code, is not a folder of yours; remove it, {fix}"
        )
    if about.st_mode & stat.S_IWOTH:
        what = "which holds compiled code, can be written to by every user"
        raise UserError(f"--compile: {folder}, {what}; remove it, as others may have put code there, {fix}")
