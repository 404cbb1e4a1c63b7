"""Read a recipe's options from its command line and --config file; the recipe itself checks them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.common.arguments import expand_home
from recipes.common.errors import UserError
from scripts.launch import script


def read_option(name: str, default: str, words: Sequence[str]) -> str:
    """Return an option's last value in `words` (--name x, --name=x), else its --config file's, or `default`.

    A ~ at its start is the home folder, as where the recipe reads a path.
    """
    value = None
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            value = words[i + 1]
        elif word.startswith(f"{name}="):
            value = word.removeprefix(f"{name}=")
    if value is None and name != "--config" and not script.is_set():
        value = read_config_texts(read_option("--config", "", words)).get(name.removeprefix("--"))
    return default if value is None else expand_home(value)


def read_config_texts(path: str) -> dict[str, str]:
    """Return the text values of a recipe's configuration file by flag, none if the recipe will refuse the file."""
    if not path:
        return {}
    try:
        from recipes.common.config_file import read_config

        content = read_config(Path(path))
    except ImportError:
        raise UserError(f"--config {path}: {sys.executable} has no PyYAML to read it by; install it") from None
    except UserError:
        return {}
    return {flag: value for flag, value in content.items() if isinstance(value, str)}
