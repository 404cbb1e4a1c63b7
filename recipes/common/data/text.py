"""--data text: the files below a folder as bytes, by default the sources of Python's standard library.

Each file belongs as a whole to the training or the test split, which is cut into windows of --seq-len bytes.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from recipes.common.data.splits import Batch, Data, MemorySplit, Spec, digest
from recipes.common.errors import UserError, may_pass
from recipes.common.options import STANDARD_LIBRARY, Options

VOCABULARY = 256
SEPARATOR = b"\0"
"""Ends each file. A file that contains it counts as binary, as for grep, and is left out."""
TEST_SHARE = 0.01
"""At least this share of the bytes is for the test, in whole files: 300 kB of the standard library's 30 MB."""
INSTALLED = ("site-packages", "dist-packages", "__pycache__")
"""Folders inside the standard library's folder that do not belong to it."""


class TextSplit(MemorySplit):
    """Bytes on the device, as windows of seq_len inputs; each input's target is the byte after it.

    Args:
        text: uint8, shape (N,); window i is text[i * seq_len : (i + 1) * seq_len + 1]. The rest is left out.
    """

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text = text
        # A view: neighbours share a byte, which is the last target of one and the first input of the next.
        windows = text.unfold(0, seq_len + 1, seq_len)
        super().__init__(windows[:, :-1], windows[:, 1:])

    def fingerprint(self) -> str:
        """Return a string that identifies this split: its size and a digest of all of it."""
        return f"{len(self.text)} bytes with digest {digest(self.text):08x}"

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield inputs and targets, int64 of shape (B, seq_len), for each index tensor."""
        for inputs, targets in super().batches(indices, epoch):
            yield inputs.long(), targets.long()


def load_text(args: Options, device: torch.device) -> Data:
    """Return the text below --data-dir as a data set.

    Raises UserError if the folder cannot be read, or holds too little text.
    """
    folder = args.data_dir
    suffix = ".py" if folder == STANDARD_LIBRARY else ""  # besides the sources, it holds data and compiled code
    train, test = split_files(read_files(folder, suffix), folder)

    def split(files: list[bytes], name: str) -> TextSplit:
        text = b"".join(content + SEPARATOR for content in files)
        if len(text) <= args.seq_len:
            what = f"the {name} files below {folder} hold {len(text)} bytes, too few for --seq-len {args.seq_len}"
            raise UserError(f"--data text: {what}; add files, or use at most --seq-len {len(text) - 1}")
        return TextSplit(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device), args.seq_len)

    tokens = Spec((args.seq_len,), torch.int64)
    return Data(split(train, "training"), split(test, "test"), tokens, tokens, VOCABULARY, "bytes")


def read_files(folder: Path, suffix: str = "") -> list[tuple[str, bytes]]:
    """Return (path below the folder, content) of its text files, sorted by path; hidden ones are left out.

    Raises UserError if something cannot be read.
    """

    def refuse(error: OSError) -> None:
        what = f"cannot read {error.filename} ({error.strerror})"
        raise UserError(f"--data text: {what}; give a folder of text by --data-dir", is_passing=may_pass(error))

    found = []
    try:
        for place, folders, names in os.walk(folder, onerror=refuse):
            folders[:] = [name for name in folders if name not in INSTALLED and name[0] != "."]
            for path in (Path(place, name) for name in names if name.endswith(suffix) and name[0] != "."):
                content = path.read_bytes() if is_file(path) else b""
                if content and SEPARATOR not in content:
                    found.append((path.relative_to(folder).as_posix(), content))
    except OSError as error:
        refuse(error)
    return sorted(found)


def is_file(path: Path) -> bool:
    """Return whether this is a file; raises OSError if that is unknown, unlike Python 3.14's Path.is_file()."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):  # a link that leads nowhere
            return False
        raise


def split_files(files: list[tuple[str, bytes]], folder: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the contents of the training and of the test files.

    A hash of the names decides: the split does not depend on the machine, and hardly on added or removed files. A
    file with most of the bytes is for training. Raises UserError if there are fewer than 2 files.
    """
    if len(files) < 2:
        what = f"{folder} holds {len(files)} text files"
        raise UserError(f"--data text: {what}; at least 2 are needed, 1 for the test")
    total = sum(len(content) for _, content in files)
    test: set[str] = set()
    size = 0

    def order(file: tuple[str, bytes]) -> tuple[bool, int]:
        return 2 * len(file[1]) > total, zlib.crc32(file[0].encode(errors="surrogateescape"))

    for path, content in sorted(files, key=order):
        if (size >= TEST_SHARE * total and test) or len(test) == len(files) - 1:
            break
        test.add(path)
        size += len(content)
    train = [content for path, content in files if path not in test]
    return train, [content for path, content in files if path in test]
