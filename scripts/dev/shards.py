"""Pack an image folder into shards, which --data shards reads (recipes/common/data/shards.py).

make shards DATA_DIR=/data/imagenet OUT=/data/imagenet-shards
python -m scripts.dev.shards /data/imagenet /data/imagenet-shards --shard-mb 1000
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path

from recipes.common.arguments import path_or_url, positive_int, url_of
from recipes.common.data.shards import SPLITS, pack
from recipes.common.errors import UserError
from scripts.launch.command import CommandParser, command, parse


@command
def main(argv: list[str]) -> None:
    """Pack the images, and print a line for each shard."""
    parser = CommandParser("python -m scripts.dev.shards", __doc__)
    parser.add_argument("source", metavar="DATA_DIR", type=Path)
    parser.add_argument("folder", metavar="OUT", type=path_or_url)  # a URL is refused below
    parser.add_argument("--shard-mb", type=positive_int, default=1000, help="size of a shard in MB")
    args = parse(parser, argv)
    if url := url_of(args.folder):
        raise UserError(f"OUT {url} is a URL; give a folder, and copy it to the server when it is packed")
    out = args.folder.resolve()
    if any(out.is_relative_to((args.source / split).resolve()) for split in SPLITS):
        what = "is among the images of DATA_DIR"
        raise UserError(f"OUT {args.folder} {what}; choose a folder outside of its train and val")
    images = 0
    try:
        for name, number in pack(args.source, args.folder, args.shard_mb * 10**6):
            images += number
            with contextlib.suppress(OSError):  # the output is closed or full: reported once all is packed
                print(f"{args.folder / name}: {number} images", flush=True)
    except UserError as error:
        raise UserError(str(error).replace("--data-dir:", "DATA_DIR:", 1)) from None
    except FileExistsError as error:
        fix = "let it end, or choose another OUT"
        raise UserError(f"{error.filename} exists: another make shards writes there; {fix}") from None
    except OSError as error:
        raise UserError(
            f"{error.filename or args.folder}: {error.strerror or error}; nothing is whole: remove "
            f"{args.folder}, fix this and pack again"
        ) from None
    print(f"packed {images} images; train with --data shards --data-dir {shlex.quote(str(args.folder))}")


if __name__ == "__main__":
    sys.exit(main())
