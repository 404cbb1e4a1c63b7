"""--data tokens: text that a tokenizer has turned into numbers, in files below a folder.

    numpy.array(ids, numpy.uint16).tofile("train.bin")

writes such a file: 2 bytes per token, or 4 if --vocab-size is above 65536. nanoGPT's prepare.py writes the same.
Files of llm.c and its successors begin with a header, which says how many tokens follow, and of how many bytes.
Each file is cut into windows of --seq-len tokens. Worker processes read a window where it lies, so that a data set
may be larger than the memory.

Sources: https://github.com/karpathy/nanoGPT (data/openwebtext), https://github.com/karpathy/llm.c (dev/data).
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from isal import isal_zlib
from torch.utils.data import Dataset

from recipes.common.arguments import read_number
from recipes.common.data.file_pool import FilePool
from recipes.common.data.splits import Data, Spec, digest
from recipes.common.data.workers import LoadedSplit, Sample, read_evenly
from recipes.common.errors import UserError, as_user_error, may_pass
from recipes.common.folders import check_file
from recipes.common.options import Options

SPLIT_NAME = re.compile(r"(?<![A-Za-z])(train|val)")
"""In the name of a file of tokens: which split it belongs to. Not within a word: pretrain, interval."""

HEADER_BYTES = 1024
MARKS = {20240520: 2, 20240801: 4}
"""The first number of a header (GPT-2's and Llama 3's tokens): the bytes of each token. The third counts them."""

PROBE_BYTES = 2**14
"""The first bytes of a file show if its tokens are wider than expected, and go into its split's digest."""
MIN_PROBED = 8
"""Fewer different tokens show nothing: one, and zeros as padding, may be right."""

FINGERPRINT_WINDOWS = 64
"""Up to this many windows of a split, evenly spaced, go into its digest, too."""


class TokenFile(NamedTuple):
    """Where the tokens of a file lie."""

    path: str
    offset: int
    """Of the first token, in bytes."""
    num_tokens: int
    width: int
    """Bytes of a token."""
    checksum: int
    """The CRC-32 of its first bytes."""

    def read(self, files: FilePool, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from `start` on, int64; raises OSError if they cannot be read, or ValueError."""
        content = files.read(self.path, self.offset + start * self.width, count * self.width)
        if len(content) < count * self.width:
            raise ValueError("it has become shorter")
        return np.frombuffer(content, f"<u{self.width}").astype(np.int64)


def inspect_file(path: Path, width: int) -> TokenFile:
    """Return where a file's tokens lie, each of `width` bytes unless a header says otherwise.

    Raises UserError if it cannot be read, has another size than its tokens, or wider ones.
    """
    with as_user_error("read", path):
        check_file(path)
        with open(path, "rb") as file:
            start, size = file.read(PROBE_BYTES), file.seek(0, 2)
    offset, count = 0, size // width
    mark, _, marked_count = struct.unpack_from("<3i", start.ljust(12, b"\0"))
    if mark in MARKS:
        offset, count, width = HEADER_BYTES, marked_count, MARKS[mark]
    elif found := find_width(start, width):
        fix = f"write numpy.uint{8 * width}, as docs/data.md shows"
        raise UserError(f"--data tokens: {path} has {found} bytes for each token, and {width} are read; {fix}")
    if size != offset + count * width:
        what = f"{path} has {size} bytes, which are not {count} tokens of {width} bytes each"
        raise UserError(f"--data tokens: {what}; copy it again, or give the --vocab-size that it was written for")
    return TokenFile(str(path), offset, count, width, isal_zlib.crc32(start))


def find_width(content: bytes, width: int) -> int:
    """Return 4 or 8 if tokens of `width` bytes seem to have so many: all but their lowest `width` bytes are 0.

    Otherwise, return 0. numpy.array(ids) has 8 bytes for each token.
    """
    values = np.frombuffer(content[: len(content) // 8 * 8], f"<u{width}")
    for wide in (8, 4):
        parts = values.reshape(-1, max(1, wide // width))
        if wide > width and len(np.unique(parts[:, 0])) >= MIN_PROBED and not parts[:, 1:].any():
            return wide
    return 0


class TokenWindows(Dataset[Sample]):
    """Windows of seq_len tokens by (epoch, index); each token's target is the one after it.

    Neighbours share a token, the last target of one and the first input of the next. The tokens of a file that do
    not fill a window are left out. A window that cannot be read comes back as zeros, with its fault.
    """

    def __init__(self, files: Sequence[TokenFile], seq_len: int, vocab_size: int) -> None:
        self.files, self.seq_len, self.vocab_size = files, seq_len, vocab_size
        counts = [max(0, file.num_tokens - 1) // seq_len for file in files]
        self.begins = np.cumsum([0, *counts])
        """The first window of each file, and the number of all."""
        self.pool = FilePool(len(files))

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        _, index = key
        number = int(self.begins.searchsorted(index, side="right")) - 1
        file, start = self.files[number], (index - int(self.begins[number])) * self.seq_len
        try:
            tokens = file.read(self.pool, start, self.seq_len + 1)
            if (largest := tokens.max()) >= self.vocab_size:
                raise ValueError(f"token {largest} is not below --vocab-size {self.vocab_size}")
            fault, is_passing = "", False
        except (OSError, ValueError) as error:
            reason, is_passing = error.strerror if isinstance(error, OSError) else error, may_pass(error)
            fault = f"--data tokens: cannot use {file.path} at token {start}: {reason}"
            tokens = np.zeros(self.seq_len + 1, np.int64)
        window = torch.from_numpy(tokens)
        return Sample(window[:-1], window[1:], fault, is_passing=is_passing)

    def fingerprint(self) -> str:
        """Return a string that identifies the windows: their number, and a digest of each file's size and start.

        Some windows go into the digest, too: raises UserError if one of these cannot be read.
        """
        inputs = [sample.input for sample in read_evenly(self, FINGERPRINT_WINDOWS)]
        files = torch.tensor([(file.num_tokens, file.checksum) for file in self.files])
        return f"{len(self)} windows with digest {digest(files, *inputs):08x}"


def find_token_files(args: Options) -> bytes:
    """Return the TokenFiles below --data-dir for all ranks, in JSON; raises UserError as load_tokens()."""
    width = width_of(args)
    files = [inspect_file(path, width) for paths in list_files(args).values() for path in paths]
    return json.dumps(files).encode()


def list_files(args: Options) -> dict[str, list[Path]]:
    """Return the files of tokens in --data-dir by split, sorted; raises UserError."""
    try:
        paths = sorted(args.data_dir.iterdir())
    except OSError as error:
        what = f"cannot read {args.data_dir} ({error.strerror})"
        what = f"--data tokens: {what}; give the folder of train.bin and val.bin by --data-dir"
        raise UserError(what, is_passing=may_pass(error)) from None
    splits: dict[str, list[Path]] = {"train": [], "val": []}
    for path in paths:
        if path.suffix == ".bin" and path.name[0] != ".":
            if len(found := set(SPLIT_NAME.findall(path.name))) > 1:
                raise UserError(f"--data tokens: {path} has both 'train' and 'val' in its name; rename it")
            for split in found:
                splits[split].append(path)
    return splits


def width_of(args: Options) -> int:
    """Return the bytes of a token in files without a header."""
    return 2 if args.vocab_size <= 2**16 else 4


def inspect_files(paths: Sequence[Path], width: int, found: bytes) -> list[TokenFile]:
    """Return where the tokens of all files lie; `found` is rank 0's find_token_files(), or empty.

    The ranks of a node share out the files of its copy, since thousands of ranks that open all of them overload a
    file system. If a file differs from rank 0's, so does the fingerprint of the rank that inspects it. A rank with
    another --data-dir than rank 0 inspects all: its folder may be its own.
    """
    known = {path: TokenFile(path, *values) for path, *values in json.loads(found or b"[]")}
    count = read_number("LOCAL_WORLD_SIZE", 1, 1)
    own = set(paths[read_number("LOCAL_RANK", 0) % count :: count])
    return [
        inspect_file(path, width) if path in own or str(path) not in known else known[str(path)] for path in paths
    ]


def load_tokens(
    args: Options, device: torch.device, on_fault: Callable[[UserError], None], found: bytes = b""
) -> Data:
    """Return the tokens below --data-dir as a data set; `on_fault` gets the error of a window that fails later.

    `found` is empty unless rank 0 has inspected the files for all ranks. Raises UserError if there are no files,
    one of them has a wrong size, or they hold too few tokens.
    """
    splits = list_files(args)

    def report(error: UserError) -> None:
        on_fault(UserError(f"{error}; fix this, then add --resume auto", is_passing=error.status == 1))

    def load_split(split: str) -> LoadedSplit:
        named = splits[split]
        if not named:
            like = f"such as {split}.bin or x_{split}_1.bin"
            what = f"{args.data_dir} has no file of tokens with {split!r} in its name, {like}"
            raise UserError(f"--data tokens: {what}; docs/data.md says how to write it")
        windows = TokenWindows(inspect_files(named, width_of(args), found), args.seq_len, args.vocab_size)
        if not len(windows):
            longest = max(file.num_tokens for file in windows.files)
            what = f"the {split} files in {args.data_dir} have at most {longest} tokens, too few for a window"
            raise UserError(f"--data tokens: {what} of --seq-len {args.seq_len} and the token after it")
        short = sum(file.num_tokens <= args.seq_len for file in windows.files)
        if short and os.environ.get("RANK", "0") == "0":
            what = f"{short} of {len(named)} {split} files have at most --seq-len {args.seq_len} tokens"
            print(f"note: {what}, and are left out", file=sys.stderr)
        return LoadedSplit(windows, args, device, report)

    tokens = Spec((args.seq_len,), torch.int64)
    return Data(load_split("train"), load_split("val"), tokens, tokens, args.vocab_size, "tokens")
