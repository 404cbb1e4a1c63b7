"""--compile: the folder in which torch keeps compiled code, and from which it runs whatever it finds."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from torch._inductor.runtime.runtime_utils import default_cache_dir

from recipes.common.errors import UserError


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
