"""Decode image files: of a JPEG only the part that is needed, other formats whole.

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
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import get_worker_info


class CropBox(NamedTuple):
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


JPEG_BEGIN, JPEG_SCAN, JPEG_END = b"\xff\xd8\xff", b"\xff\xda", b"\xff\xd9"

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF", "JPEG2000", "AVIF")
"""The formats that Pillow may read, whatever a file's name: of EPS, it would let Ghostscript run the file."""

BAD_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What read() and decode() raise on a file that cannot be read or does not decode."""


def read(path: str) -> bytes:
    """Return a file's content; raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def decode(content: bytes, choose: Callable[[int, int], CropBox]) -> Tensor:
    """Return the part of an image that choose(width, height) selects: uint8, shape (H, W, 3).

    `choose` may be called twice, and has to return the same.

    Raises an error of BAD_IMAGE if the file's content does not decode.
    """
    if found := find_part(content, choose):
        decoder, params = _decoder(os.getpid())
        decoded = decoder.decode(found[0], params=params)
        if decoded is not None:
            return torch.from_numpy(np.asarray(decoded))
    if ends_in_zeros(content):
        raise ValueError("its end is zeros, as after an interrupted copy")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            rgb = _to_8_bits(image).convert("RGB")
    except (UnidentifiedImageError, KeyError):  # KeyError: a Pillow without one of FORMATS has tried all others
        raise ValueError("not an image of a supported format") from None
    except (*BAD_IMAGE, MemoryError):
        raise
    except Exception as error:  # of damaged headers: TypeError, EOFError, struct.error
        raise ValueError(f"{type(error).__name__}: {error}") from None
    box = choose(*rgb.size)
    part = rgb.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    return torch.from_numpy(np.array(part))


def ends_in_zeros(content: bytes) -> bool:
    """Return whether a JPEG has zeros in place of its end: decoders take them for pixels."""
    if not content.startswith(JPEG_BEGIN) or any(content[-16:]):
        return False
    # Zeros may also follow a whole image. An end before the last scan is that of a thumbnail.
    return content.rfind(JPEG_END) < content.rfind(JPEG_SCAN)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Return the upper 8 bits of a 16-bit grey image: Pillow would make all above 255 white. Others are unchanged.

    Raises ValueError for 32-bit values outside of 0 to 255, or fractions from 0 to 1: nothing says which is white.
    """
    # Pillow scales PGM files of more than 8 bits to 16.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        low, high = np.asarray(image).min(), np.asarray(image).max()
        if not 0 <= low <= high <= 255 or (image.mode == "F" and 0 < high <= 1):
            raise ValueError(f"its values of 32 bits are {low} to {high}, not 0 to 255")
    return image


def find_part(content: bytes | np.ndarray, choose: Callable[[int, int], CropBox]) -> tuple[Any, CropBox] | None:
    """Return the part of an image that choose(width, height) selects, as nvImageCodec's stream and as a box.

    Return None for what Pillow has to decode: all but whole plain colour JPEGs. `content` must outlive the stream.
    """
    codec = import_nvimgcodec()
    # A truncated file lacks its end marker: decoding it whole shows whether data below the crop are missing.
    if codec is None or bytes(content[:3]) != JPEG_BEGIN or bytes(content[-2:]) != JPEG_END:
        return None
    try:
        stream = codec.CodeStream(content)
        width, height, channels = stream.width, stream.height, stream.num_channels
    except RuntimeError:
        return None
    limit = Image.MAX_IMAGE_PIXELS
    if channels != 3 or not width * height or (limit and width * height > limit):  # Pillow reports the last two
        return None
    box = choose(width, height)
    region = codec.Region(box.top, box.left, box.top + box.height, box.left + box.width)
    return stream.get_sub_code_stream(region=region), box


@functools.cache
def import_nvimgcodec() -> Any:
    """Return nvImageCodec, or None if it is not installed."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # Pillow reports damaged files
    if get_worker_info():
        # Its import asks nvJPEG what the GPU can do. That would make a CUDA context on the node's first GPU, some
        # 500 MB, in each worker of all ranks.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with _without_standard_error():  # it reports each of its GPU plug-ins that lacks a library
            from nvidia import nvimgcodec
    except ImportError:
        return None
    return nvimgcodec


@functools.cache
def _decoder(pid: int) -> tuple[Any, Any]:
    """Return a decoder for this process (a forked process needs its own) and its settings."""
    codec = import_nvimgcodec()
    # One thread: --workers processes decode at the same time.
    return make_decoder(codec.NVIMGCODEC_DEVICE_CPU_ONLY, 1, codec.BackendKind.CPU_ONLY)


def make_decoder(device: int, threads: int, *kinds: Any) -> tuple[Any, Any]:
    """Return a decoder with these kinds of back end, and settings that give Pillow's pixels."""
    codec = import_nvimgcodec()
    decoder = codec.Decoder(
        device_id=device,
        max_num_cpu_threads=threads,
        backends=[codec.Backend(kind) for kind in kinds],
        options=":fancy_upsampling=1",
    )
    return decoder, codec.DecodeParams(apply_exif_orientation=False)


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
