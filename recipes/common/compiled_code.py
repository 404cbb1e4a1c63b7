"""--compile: checks of the compiler, and of the folder from which torch runs compiled code."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.runtime_utils import default_cache_dir

from recipes.common.errors import UserError


def check_compiler(device: torch.device) -> None:
    """Raise UserError as check_folder(), or if there is no C++ compiler (CPU) or no complete C compiler (GPU)."""
    check_folder()
    host = socket.gethostname()
    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            fix = "install g++, set CXX to a C++ compiler, or drop --compile"
            raise UserError(f"--compile: {host} has no C++ compiler; {fix}") from None
        return
    # Triton compiles the Python extension that starts its kernels with this compiler (triton/runtime/build.py).
    if not (compiler := os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        fix = "install gcc, set CC to a C compiler, or drop --compile"
        raise UserError(f"--compile: {host} has no C compiler; {fix}")
    headers = sysconfig.get_path("include", "posix_prefix")
    command = [compiler, f"-I{headers}", "-fsyntax-only", "-x", "c", "-"]
    try:
        subprocess.run(command, input=b"#include <Python.h>", capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        fix = "install Python's headers (python3-dev), set CC to another C compiler, or drop --compile"
        raise UserError(f"--compile: on {host}, {compiler} does not compile Python.h; {fix}") from None


def check_folder() -> None:
    """Make torchinductor_USER in the temporary folder; raise UserError if others own it or can write to it.

    Others can guess its name, and torch does not check whose it is. Even if TORCHINDUCTOR_CACHE_DIR names another
    folder, torch keeps headers in this one.
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
    what = f"--compile: {folder}, which holds compiled code,"
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise UserError(f"{what} is not a folder of yours; remove it, {fix}")
    if about.st_mode & stat.S_IWOTH:
        why = "as others may have put code there"
        raise UserError(f"{what} can be written to by every user; remove it, {why}, {fix}")
