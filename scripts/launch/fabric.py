"""The environment that scripts/launch/fabric.sh makes of this node's, for starters that are not shell scripts."""

from __future__ import annotations

import os
import subprocess
import sys

from recipes.common.errors import UserError
from scripts.launch.command import ROOT

TIMEOUT_S = 60.0


def fabric_environment(**defaults: str) -> tuple[dict[str, str], str]:
    """Return the environment after fabric.sh, and the line in which fabric.sh reports its choice.

    `defaults` are for variables that the environment does not set, such as FABRIC. Raises UserError if fabric.sh
    refuses (is_passing if another start may succeed), subprocess.TimeoutExpired if a device or a name look-up does
    not answer.
    """
    done = subprocess.run(
        ["bash", "-c", "source scripts/launch/fabric.sh >&2 && env -0"],
        cwd=ROOT,
        env={**defaults, **os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        errors="surrogateescape",  # as in os.environ: a value may be of any bytes
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix("error: ")
        raise UserError(said, on_every_node=True, is_passing=done.returncode == 1)
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if "=" in item), done.stderr
