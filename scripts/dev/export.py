"""Write the weights of a checkpoint to one file: a state dict by name, for inference.

make export RUN=runs/ddp-001 OUT=model.pt
python -m scripts.dev.export runs/ddp-001/checkpoints/best.pt model.pt

Given a run's folder, it exports the newest good checkpoint. `model.load_state_dict(torch.load("model.pt",
weights_only=True))` loads the file without this repository. A name that ends with .safetensors gets that format.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import torch

from recipes.common.checkpoint.shard_files import read_whole
from recipes.common.errors import UserError
from recipes.common.record.resume import read_path
from scripts.launch.command import CommandParser, command, probe_folder

ENDINGS = ("", ".pt", ".pth", ".bin", ".ckpt", ".safetensors")
"""Of names of files in torch's format, and the other one."""


@command
def main(argv: list[str]) -> None:
    """Export the weights, and print what the file holds."""
    parser = CommandParser("python -m scripts.dev.export", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder (runs/NAME), or a checkpoint")
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write")
    args = parser.parse_args(argv)
    if args.out.suffix.lower() not in ENDINGS:
        what = "the file has torch's format, or safetensors"
        raise UserError(f"OUT {args.out}: {what}; let its name end with .pt or .safetensors")
    try:
        if args.out.exists():
            raise UserError(f"OUT {args.out} exists; remove it, or choose another name")
        probe_folder(args.out.parent)  # reading may take minutes
    except OSError as error:
        raise UserError(f"cannot write {args.out}: {error.strerror}; choose another OUT") from None
    try:
        path, content = read_path(args.run, "RUN")
    except OSError as error:
        raise UserError(f"cannot read {error.filename or args.run}: {error.strerror or error}") from None
    weights = read_whole({name: content.get(name) for name in ("model", "shards")})["model"]
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores the latter
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # after the finally below
    temporary = args.out.with_name(f".{args.out.name}.tmp")
    try:
        if args.out.suffix.lower() == ".safetensors":
            from recipes.common.checkpoint.safetensors_files import write_safetensors

            write_safetensors(weights, temporary)
        else:
            with open(temporary, "wb") as file:
                torch.save(weights, file)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(args.out)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0]
        raise UserError(f"cannot write {args.out}: {reason}; fix this and export again") from None
    finally:
        with contextlib.suppress(OSError):  # it is gone if all went well
            temporary.unlink()
    print(f"wrote {args.out}: {len(weights)} tensors of step {content['position']['step']}, from {path}")


if __name__ == "__main__":
    sys.exit(main())
