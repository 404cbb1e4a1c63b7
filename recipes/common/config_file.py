"""Options from a small YAML file (--config) of `flag: value` lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from recipes.common.errors import UserError, nearest_option
from recipes.common.folders import check_file

KEPT = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "null", "merge"))
"""The types that YAML may recognise. A number stays text: the name 1.10 is not 1.1, and 012 is not 10."""


class Loader(yaml.SafeLoader):
    """Read values of the types in KEPT; all others are texts."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Raise UserError if a flag is given twice; YAML itself would take the last value."""
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        flags = [str(key.value).replace("_", "-") for key, _ in pairs]
        if twice := [flag for flag in flags if flags.count(flag) > 1]:
            raise UserError(f"{twice[0]} is given twice; keep one")
        return super().construct_mapping(node, deep)


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag in KEPT]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_config(path: Path) -> dict[str, Any]:
    """Return the values by flag; raises UserError if a file cannot be read, or holds something else."""
    try:
        check_file(path)
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as of !!float x, and of 1,000 brackets
        raise UserError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict | None):
        raise UserError(f"--config {path} must hold lines of the form `flag: value`")
    return {str(key).replace("_", "-"): value for key, value in (content or {}).items()}


def config_to_argv(path: Path, flags: Sequence[str]) -> list[str]:
    """Return a file's options as command-line words; `flags` are all known --flags.

    Raises UserError for an unknown option or a value of the wrong type.
    """
    words = []
    others = ("--no-", "--config", "--help")
    known = [flag.removeprefix("--") for flag in flags if not flag.startswith(others)]
    for flag, value in read_config(path).items():
        if flag not in known:
            nearest = nearest_option(flag, known)
            raise UserError(f"--config {path}: unknown option {flag!r}{nearest}; --help lists all")
        is_switch = f"--no-{flag}" in flags
        if is_switch and isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif is_switch or isinstance(value, bool | list | dict) or value is None:
            wanted = "true or false" if is_switch else "one word or number"
            raise UserError(f"--config {path}: {flag} expects {wanted}, got {value!r}")
        else:
            words.append(f"--{flag}={value}")
    return words
