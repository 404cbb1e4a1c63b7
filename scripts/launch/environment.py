"""Refuse an interpreter in which a recipe, or a script under its launcher, cannot run: one line, and status 2.

    "$PYTHON" scripts/launch/environment.py torch psutil

An older Python runs this file, too.
"""

import re
import sys
from importlib import util
from pathlib import Path


def reason_against(packages: "list[str]") -> str:
    """Return what this interpreter lacks, or "": a version, or one of the packages. It imports none of them."""
    if sys.version_info < (3, 11):  # noqa: UP036 (an environment of the user's own)
        return f"is Python {sys.version.split()[0]}, and recipes need 3.11 or later; name another one"
    files = {name: getattr(util.find_spec(name), "origin", None) for name in packages}
    if not all(files.values()):
        return f"has no {', '.join(name for name in packages if not files[name])}; install what is missing there"
    version_file = Path(str(files["torch"])).with_name("version.py")
    text = version_file.read_text() if version_file.exists() else ""
    version = re.search(r"^__version__ = '((\d+)\.(\d+).*)'", text, re.MULTILINE)
    if version and (int(version.group(2)), int(version.group(3))) < (2, 11):
        return f"has torch {version.group(1)}, and recipes need 2.11 or later; install that there"
    return ""


if __name__ == "__main__":
    reason = reason_against(sys.argv[1:])
    if reason:
        print(f"error: {sys.executable} {reason}, or leave PYTHON unset for .venv (make setup)", file=sys.stderr)
        sys.exit(2)
