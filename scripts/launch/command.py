"""What the commands of this repository share: how they read arguments, refuse, name recipes and print tables.

A command is `main(argv) -> status` decorated with @command: a UserError becomes one line on standard error and
status 2. Arguments after -- are the recipe's own. It imports nothing heavy: a refusal comes at once.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import functools
import itertools
import os
import re
import signal
import sys
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from recipes.common.arguments import Parser, expand_home, whole_number
from recipes.common.errors import UserError, adjust_output, as_user_error, lack_of_processes, nearest

ROOT = Path(__file__).resolve().parents[2]

ONE_PROCESS = ("single", "dataparallel")
"""Recipes that run in one process, whatever the number of GPUs."""

NOT_ELASTIC = (*ONE_PROCESS, "probe", "spawn", "horovod")
"""Recipes that cannot continue after the loss of a node."""

VARIABLES = (
    *("NODES", "NPROC_PER_NODE", "MIN_NODES", "MAX_RESTARTS", "ROUNDS", "SEED", "GPUS", "NAME", "FABRIC", "TIME"),
    *("GLOBAL_BATCH", "STOP_AFTER", "RESUME"),
)
FLAGS = {f"--{name.lower().replace('_', '-')}": name for name in VARIABLES}
FLAGS |= {"--gpus-per-node": "GPUS", "--cpus-per-task": "CPUS"}
"""The variable of make that sets a flag."""


RECIPE_OPTIONS = "Options of the recipe come after --, such as -- --epochs 3"
"""The end of a command's help."""


class CommandParser(Parser):
    """A parser whose errors name the variable of make that sets a flag: NODES for --nodes.

    Its help ends with `epilog`.
    """

    def __init__(self, prog: str, doc: str | None, epilog: str = "") -> None:
        super().__init__(prog, doc)
        self.epilog = epilog

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise a UserError with the message that argparse would print after its usage text."""
        flag, colon, text = message.removeprefix("argument ").partition(": ")
        if colon and flag in FLAGS:
            message = FLAGS[flag] + (" " if text.startswith("expects ") else ": ") + text
        super().error(message)


count = whole_number(1, 1024)
"""Reads a whole number from 1 to 1024: nodes, processes or rounds."""


def gpus(text: str) -> str:
    """Read a number of GPUs, with their type if that is given, as Slurm writes them: 8, h100:8."""
    if not re.fullmatch(r"([A-Za-z][\w.-]*:)?[0-9]+", text, re.ASCII):
        raise ArgumentTypeError(f"expects a whole number, or a type and a number (h100:8), got {text!r}")
    return text


def parse(parser: Parser, argv: Sequence[str]) -> Namespace:
    """Return a command's own arguments, with those after -- in `options`; raises UserError for an unknown one."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    args, unknown = parser.parse_known_args(words[:at], Namespace(options=words[at + 1 :]))
    if unknown:
        hint = nearest(unknown[0], parser.flags(), cutoff=0.7) or "; those of a recipe come after --"
        raise UserError(f"unknown option {unknown[0]}{hint}; --help lists all")
    return args


def command(main: Callable[[list[str]], int | None]) -> Callable[..., int]:
    """Let main(argv) default to the process's arguments, and turn a UserError into one line and its status."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        adjust_output()
        try:
            status = main(list(sys.argv[1:] if argv is None else argv)) or 0
            if sys.stdout:  # None: the caller has closed it
                sys.stdout.flush()
            return status
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.status
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except BrokenPipeError:  # the reader of the output has closed it, as in `make list | head -1`
            discard_output()
            return 128 + signal.SIGPIPE
        except (OSError, RuntimeError) as error:
            if text := lack_of_processes(error):
                print(f"error: {text}", file=sys.stderr, flush=True)
                return 1
            if not isinstance(error, OSError) or error.errno not in DISK_FULL_ERRORS or error.filename:
                raise
            print(f"error: cannot write: {error.strerror}; free some space", file=sys.stderr)
            discard_output()
            return 1

    return run


def warn(text: str) -> None:
    """Print a warning to standard error."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def discard_output() -> None:
    """Let what is left of the output go nowhere, so that Python does not fail to write it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def recipes() -> dict[str, str]:
    """Return the first line of each recipe's docstring, by the recipe's name."""
    found = {}
    for path in sorted(ROOT.glob("recipes/*/train.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.parent.name] = docstring.split("\n")[0]
    return found


def check_recipe(name: str) -> str:
    """Return the name if there is such a recipe; raises UserError with the nearest name if not."""
    if name.endswith(".py"):
        raise UserError(f"RECIPE {name} is a file; set SCRIPT={name}, and RECIPE to how it starts (default: ddp)")
    if not name:
        raise UserError(f"RECIPE is missing (choose from {', '.join(recipes())})")
    check_names("RECIPE", [name], list(recipes()), cutoff=0.4)  # names are short: two equal letters of three count
    return name


def check_elastic(recipe: str) -> None:
    """Raise UserError if a recipe cannot continue after the loss of a node."""
    if recipe in NOT_ELASTIC:
        raise UserError(f"{recipe} cannot be elastic; unset MIN_NODES, or use RECIPE=ddp")


def image_of(recipe: str) -> str:
    """Return the name of the image for a recipe: its own if docker/Dockerfile builds one, else ddp's."""
    dockerfile = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
    return recipe if f"\nFROM base AS {recipe}\n" in dockerfile else "ddp"


def check_names(what: str, names: Sequence[str], known: Sequence[str], cutoff: float = 0.5) -> list[str]:
    """Return the names without duplicates; raises UserError, with the nearest known name, for an unknown one."""
    for name in names:
        if name not in known:
            hint = nearest(name, known, cutoff)
            raise UserError(f"{what}: invalid choice {name!r}{hint} (choose from {', '.join(known)})")
    return list(dict.fromkeys(names))


def absolute(path: str | Path) -> Path:
    """Return an absolute path; a ~ at its start is the home folder, as in a recipe's options."""
    return Path(expand_home(str(path))).absolute()


def next_folder(kind: str, runs: Path = ROOT / "runs") -> Path:
    """Make runs/KIND-001, or the next free number, and return it; raises UserError if it cannot be made."""
    make_folder(runs)
    for number in itertools.count(1):
        folder = runs / f"{kind}-{number:03d}"
        # If two commands start together, one takes the next number.
        with as_user_error("make", folder), contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def make_folder(folder: Path) -> None:
    """Make a folder and its parents; raises UserError if it cannot be made."""
    with as_user_error("make", folder):
        folder.mkdir(parents=True, exist_ok=True)


def check_writable(folder: Path | None = None) -> None:
    """Raise UserError if no file can be made in a folder (default: runs) or, if it is missing, in its parent."""
    folder = absolute(folder or ROOT / "runs")
    place = next(path for path in (folder, *folder.parents) if path.exists())
    with as_user_error("write", place):
        probe_folder(place)


def probe_folder(folder: Path) -> None:
    """Make a file in a folder and remove it; raises OSError, without the file's name, if that fails."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror) from None


DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What the system says of a file system that takes no more data."""


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Yield a temporary folder for the files of a job's processes; raises UserError if one cannot be written.

    Files that processes write while it is deleted stay.
    """
    fix = "free some space, or set TMPDIR"
    try:
        folder = tempfile.TemporaryDirectory(prefix="cluster-recipes-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"cannot make a temporary folder: {error.strerror}; {fix}") from None
    with folder as name:
        try:
            yield name
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS or not str(error.filename).startswith(name):
                raise
            raise UserError(f"cannot write {error.filename}: {error.strerror}; {fix}") from None
