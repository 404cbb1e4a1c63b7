"""A parser whose errors are one line, and the types of the values that options take.

option(), choice() and switch() declare an option as a field of a dataclass, as in options.py.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

from recipes.common.errors import UserError, nearest, nearest_option


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are raised as UserError, instead of a usage text and an exit.

    Its help begins with the first line of `doc`, the docstring of the program's module.
    """

    def __init__(self, prog: str, doc: str | None) -> None:
        first = (doc or "").split("\n")[0]
        super().__init__(prog=prog, description=first, allow_abbrev=False, formatter_class=HelpFormatter)
        self.register("type", Path, local_path)

    def error(self, message: str) -> NoReturn:
        """Raise the message that argparse would print after its usage text."""
        raise UserError(message.removeprefix("argument "))

    def print_help(self, file: Any = None) -> None:
        """Print the help on rank 0 only."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    def flags(self) -> list[str]:
        """Return every --flag of this parser."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]

    def parse_words(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all words; raises UserError, with the nearest option for an unknown one."""
        args, unknown = self.parse_known_args(words)
        if not unknown:
            return args
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            raise UserError(f"unexpected argument {word!r}; options begin with --")
        raise UserError(f"unknown option {word}{nearest_option(word, self.flags())}; --help lists all")


class HelpFormatter(argparse.HelpFormatter):
    """Show the default of every option that has one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=110)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, "", argparse.SUPPRESS) or not action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


def whole_number(at_least: int, at_most: int | None = None) -> Callable[[str], int]:
    """Return a type for argparse: a whole number between bounds, written in digits only."""
    bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"

    def parse_value(text: str) -> int:
        value = int(text) if re.fullmatch(r"[0-9]{1,20}", text) else -1
        if value < at_least or (at_most is not None and value > at_most):
            raise argparse.ArgumentTypeError(f"expects a whole number {bounds}, got {text!r}")
        return value

    return parse_value


def read_number(name: str, default: int, at_least: int = 0, at_most: int | None = None) -> int:
    """Return the whole number in an environment variable; raises UserError for anything else."""
    try:
        return whole_number(at_least, at_most)(os.environ.get(name) or str(default))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{name} {error}") from None


LARGEST = 1e30
"""The largest number of an option: float32, which torch computes in, ends at 3.4e38."""


def _number(accept: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    def parse_value(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= LARGEST or not accept(value):
            bound = f", and at most {LARGEST:g}" if value > LARGEST else ""
            raise argparse.ArgumentTypeError(f"expects {wanted}{bound}, got {text!r}")
        return value

    return parse_value


positive_int, two_or_more, non_negative_int = whole_number(1), whole_number(2), whole_number(0)
seconds = _number(lambda value: 1 <= value <= 1e9, "a number from 1 to 1e9")
positive_float = _number(lambda value: value > 0, "a number above 0")
non_negative_float = _number(lambda value: value >= 0, "a number of at least 0")
fraction = _number(lambda value: 0 <= value < 1, "a number of at least 0 and below 1")


def one_of(*words: str) -> Callable[[str], str]:
    """Return a type for argparse: one of these values. Its error names the nearest value and all of them."""

    def parse_value(text: str) -> str:
        if text not in words:
            what = f"invalid choice {text!r}{nearest(text, words)}"
            raise argparse.ArgumentTypeError(f"{what} (choose from {', '.join(words)})")
        return text

    return parse_value


def is_user_code(text: str) -> bool:
    """Return whether an option names the user's own code: package.module:function."""
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", text) is not None


SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+"
"""What a URL begins with, before its colon; two letters at least."""


def url_of(place: Path) -> str | None:
    """Return the URL that was given as a path (a Path turns its two slashes into one); None for a local path."""
    match = re.match(rf"({SCHEME}):/(?=[^/])", str(place))
    return f"{match[1].lower()}://{str(place)[match.end() :]}" if match else None


def option_text(value: Any) -> str:
    """Return an option's value as text; of a Path that holds a URL, the URL."""
    return (url_of(value) if isinstance(value, Path) else None) or str(value)


def expand_home(text: str) -> str:
    """Return a path, ~ or ~/ at its start being the home folder; if there is none, ~ is a name like any other.

    As slurm/job.sh, it does not know ~name.
    """
    is_home = text == "~" or text.startswith("~/")
    return os.path.expanduser(text) if is_home else text  # noqa: PTH111 (Path.expanduser() raises an error instead)


def path_or_url(text: str) -> Path:
    """Return a path, or a URL as url_of() reads it; refuse one without a host, which a Path would invent."""
    if not text or "\0" in text or re.match(rf"{SCHEME}://(/|$)", text):
        raise argparse.ArgumentTypeError(f"expects a path, or a URL with a host, got {text!r}")
    return Path(expand_home(text))


def local_path(text: str) -> Path:
    """Return a path; refuse "", which would be the current folder, and a URL, which would make a folder of it."""
    if not text or "\0" in text or re.match(f"{SCHEME}://", text):
        raise argparse.ArgumentTypeError(f"expects a path on a disk of this machine, got {text!r}")
    return Path(expand_home(text))


def one_of_or_own(*words: str) -> Callable[[str], str]:
    """Return a type for argparse: one of the words (none: a name), or package.module:function."""
    parse_value = one_of(*words, "package.module:function")

    def parse_name(text: str) -> str:
        if is_user_code(text) or (not words and re.fullmatch(r"[\w-]+", text)):
            return text
        own = ":".join(text.removesuffix(".py").rsplit(".", 1))
        if not words or is_user_code(own):
            hint = f"; did you mean {own!r}?" if is_user_code(own) else ""
            name = "" if words else "a name, or "
            raise argparse.ArgumentTypeError(
                f"expects {name}package.module:function for your own, got {text!r}{hint}"
            )
        return parse_value(text)

    return parse_name


def plain_name(text: str) -> str:
    """Return a run's name if it is valid: it becomes a folder below --runs-dir and must not lead out of it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text):
        wanted = "at most 100 letters, digits, '.', '_' and '-', the first a letter or digit"
        raise argparse.ArgumentTypeError(f"expects {wanted}, got {text!r}")
    return text


def option(default: Any, parse_value: Callable[[str], Any], help_text: str, metavar: str | None = None) -> Any:
    """Return a field of a dataclass of options: --flag VALUE, where the flag is the field's name."""
    settings = {"type": parse_value, "help": help_text, "metavar": metavar}
    return field(default=default, metadata=settings)


def choice(help_text: str, *words: str) -> Any:
    """Return a field of a dataclass of options: --flag with one of these values, by default the first."""
    return option(words[0], one_of(*words), help_text, f"{{{','.join(words)}}}")


def switch(help_text: str, default: bool | None = False) -> Any:
    """Return a field of a dataclass of options: --flag and --no-flag."""
    return field(default=default, metadata={"action": argparse.BooleanOptionalAction, "help": help_text})
