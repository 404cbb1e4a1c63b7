"""The options that the command and its ranks have in common, without torch: a refusal comes at once."""

from __future__ import annotations

import re
from argparse import Namespace

from recipes.common.arguments import Parser, positive_float
from recipes.common.errors import UserError
from scripts.launch.command import check_names

BACKENDS = ("gloo", "nccl", "mpi", "horovod")
OPS = ("all-reduce", "broadcast", "all-gather")
SIZES = "4,1k,16k,256k,4m,64m"
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
LARGEST = 2**33
"""In bytes. Above this size, even one call can exceed every time limit."""


def add_options(parser: Parser) -> None:
    """Add the options that the ranks and the command that starts them share."""
    add = parser.add_argument
    add("--ops", default=",".join(OPS), metavar="OP,...", help=f"some of {', '.join(OPS)}")
    add("--sizes", default=SIZES, metavar="BYTES,...", help="sizes of the result: 4,64k,16m")
    add("--seconds", type=positive_float, default=0.5, metavar="S", help="how long each line is measured")
    add("--timeout-s", type=positive_float, default=60.0, metavar="S", help="longest wait for another rank")
    add("--link-gbit", type=positive_float, metavar="G", help="the link's speed in Gbit/s")


def check_options(args: Namespace) -> None:
    """Raise UserError if a size is invalid or an operation is unknown."""
    parse_sizes(args.sizes)
    check_names("--ops", args.ops.split(","), OPS)


def parse_sizes(text: str) -> list[int]:
    """Parse sizes such as "4,64k,16m"; return them in bytes, each once, smallest first; raises UserError."""
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"([0-9]{1,12})([kmg]?)b?", word.strip().lower())
        size = int(match[1]) * UNITS[match[2]] if match else 0
        if size % 4 or not 4 <= size <= LARGEST:
            expected = f"multiples of 4 bytes up to {LARGEST // 2**30}g, such as 4,64k,16m"
            raise UserError(f"--sizes expects {expected}, got {word!r}")
        sizes.append(size)
    return sorted(set(sizes))
