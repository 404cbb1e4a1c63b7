"""Decode image files: of a JPEG only the part that is asked for, of anything else all of it.

A random-resized crop uses about half of an image, and decoding is most of its cost. Above and left of a crop,
libjpeg-turbo can skip the inverse transform, the upsampling and the colour conversion (jpeg_crop_scanline,
jpeg_skip_scanlines); below it, everything. nvImageCodec (https://github.com/NVIDIA/nvImageCodec) makes this
available in Python; its CPU decoder needs no GPU. Pillow, which also uses libjpeg-turbo, decodes everything else:
other formats, grey, CMYK and damaged JPEGs, and all images on systems that nvImageCodec does not support. The
pixels of the two are the same to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class Box(NamedTuple):
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


JPEG_BEGIN, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"

BAD_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What read() and decode() raise on a file that cannot be read or does not decode."""


def read(path: str) -> bytes:
    """Return a file's content; raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def decode(content: bytes, choose: Callable[[int, int], Box]) -> Tensor:
    """Return the part of an image that choose(width, height) selects: uint8, shape (H, W, 3).

    `choose` may be called twice, and has to return the same.

    Raises an error of BAD_IMAGE if the file's content does not decode.
    """
    # A truncated file lacks its end marker: decoding it whole shows whether data below the crop are missing.
    if content.startswith(JPEG_BEGIN) and content.endswith(JPEG_END):
        pixels = _decode_part(content, choose)
        if pixels is not None:
            return pixels
    with Image.open(io.BytesIO(content)) as image:
        rgb = _to_8_bits(image).convert("RGB")
    box = choose(*rgb.size)
    part = rgb.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    return torch.from_numpy(np.array(part))


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Return the upper 8 bits of a 16-bit grey image, and others unchanged: Pillow treats all above 255 as white.

    Raises ValueError for 32-bit values outside of 0 to 255: nothing says which value is white.
    """
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        low, high = np.asarray(image).min(), np.asarray(image).max()
        if not 0 <= low <= high <= 255:
            raise ValueError(f"its values of 32 bits are {low} to {high}, not 0 to 255")
    return image


def decodes_parts() -> bool:
    """Return whether nvImageCodec is installed; without it, Pillow decodes everything whole."""
    return _library() is not None


def _decode_part(content: bytes, choose: Callable[[int, int], Box]) -> Tensor | None:
    """Return what decode() does if this is a plain colour JPEG and nvImageCodec can decode it, else None."""
    codec = _library()
    if codec is None:
        return None
    try:
        stream = codec.CodeStream(content)
        width, height, channels = stream.width, stream.height, stream.num_channels
    except RuntimeError:
        return None
    limit = Image.MAX_IMAGE_PIXELS
    if channels != 3 or (limit and width * height > limit):  # Pillow reports the latter
        return None
    box = choose(width, height)
    region = codec.Region(box.top, box.left, box.top + box.height, box.left + box.width)
    decoder, params = _decoder(os.getpid())
    image = decoder.decode(stream.get_sub_code_stream(region=region), params=params)
    return None if image is None else torch.from_numpy(np.asarray(image))


@functools.cache
def _library() -> Any:
    """Return nvImageCodec, or None if it is not installed."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # Pillow reports damaged files
    try:
        with _without_standard_error():  # it reports each of its GPU plug-ins that lacks a library
            from nvidia import nvimgcodec
    except ImportError:
        return None
    return nvimgcodec


@functools.cache
def _decoder(pid: int) -> tuple[Any, Any]:
    """Return a decoder for this process (a forked process needs its own) and its settings."""
    codec = _library()
    decoder = codec.Decoder(
        device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,  # --workers sets how many processes decode
        backends=[codec.Backend(codec.BackendKind.CPU_ONLY)],
        options=":fancy_upsampling=1",  # as Pillow does
    )
    return decoder, codec.DecodeParams(apply_exif_orientation=False)  # Pillow does not, either


@contextlib.contextmanager
def _without_standard_error() -> Iterator[None]:
    """Discard what libraries write to the file descriptor of standard error."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
