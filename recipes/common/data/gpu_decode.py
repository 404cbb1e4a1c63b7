"""--decode gpu: workers read files and choose crops, and each rank decodes the JPEGs of a batch on its GPU.

nvImageCodec uses the GPU's JPEG engine, its cores, or both. Its pixels differ a little from libjpeg-turbo's, and
scaling in floating point rounds differently. What Pillow has to decode (images.py) is decoded by the workers.

The tests run all of this with nvImageCodec's CPU decoder; docs/evidence.md says what has run on a GPU.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recipes.common.data.images import BAD_IMAGE, CropBox, decode, find_part, import_nvimgcodec, make_decoder
from recipes.common.data.workers import Sample
from recipes.common.errors import UserError
from recipes.common.task import SKIPPED


class Encoded(NamedTuple):
    """The input of a sample, or of a batch, before JPEGs are decoded."""

    content: Tensor
    """uint8: the image's file, or its final pixels (S, S, 3) flattened; of a batch, one after another."""
    plan: Tensor
    """int64, (7,) or (B, 7): index, length of the content, whether to flip, and the CropBox (width 0: pixels)."""


EncodedBatch = tuple[Encoded, Tensor, Sequence[str], Sequence[bool], Sequence[bool]]
"""The fields of Sample, for a batch."""

DecodedBatch = tuple[Tensor, Tensor, list[str], list[bool], Sequence[bool]]
"""The same, decoded."""


def encode(content: bytes, index: int, is_flipped: bool, box: CropBox) -> Encoded:
    """Return a JPEG and the box of it to decode."""
    return Encoded(
        torch.frombuffer(bytearray(content), dtype=torch.uint8),
        torch.tensor([index, len(content), is_flipped, *box]),
    )


def encode_pixels(pixels: Tensor, index: int) -> Encoded:
    """Return an image that is decoded already: uint8, shape (S, S, 3)."""
    return Encoded(pixels.flatten(), torch.tensor([index, pixels.numel(), False, 0, 0, 0, 0]))


def collate(samples: Sequence[Sample]) -> EncodedBatch:
    """Return encoded samples as a batch, as default_collate() does with inputs of one size."""
    inputs, targets, faults, are_damaged, are_passing = zip(*samples, strict=True)
    contents, plans = zip(*inputs, strict=True)
    encoded = Encoded(torch.cat(contents), torch.stack(plans))
    return encoded, torch.stack(targets), faults, are_damaged, are_passing


class PartDecoder:
    """Decodes parts of JPEGs on a GPU with the help of some threads; on a CPU, the pixels are the workers'.

    Raises UserError if nvImageCodec cannot decode on this device.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        codec = import_nvimgcodec()
        if codec is None:
            raise UserError("--decode gpu needs nvImageCodec: pip install 'nvidia-nvimgcodec-cu13[nvjpeg]'")
        kinds, number = [codec.BackendKind.CPU_ONLY], codec.NVIMGCODEC_DEVICE_CPU_ONLY
        if device.type == "cuda":
            kinds = [codec.BackendKind.HW_GPU_ONLY, codec.BackendKind.GPU_ONLY, codec.BackendKind.HYBRID_CPU_GPU]
            number = device.index or 0
        jpeg = io.BytesIO()
        Image.new("RGB", (16, 16)).save(jpeg, "JPEG")
        reason = "cannot decode"
        try:
            self.decoder, self.params = make_decoder(number, threads, *kinds)
            works = self([(np.frombuffer(jpeg.getvalue(), np.uint8), CropBox(0, 0, 16, 16))])[0] is not None
        except RuntimeError as error:
            works, reason = False, f"fails ({str(error).splitlines()[0]})"
        if not works:
            fix = "pip install 'nvidia-nvimgcodec-cu13[nvjpeg]', which has nvJPEG, or drop it"
            raise UserError(f"--decode gpu: nvImageCodec {reason} on {device}; {fix}")

    def __call__(self, parts: Sequence[tuple[np.ndarray, CropBox]]) -> list[Tensor | None]:
        """Return the pixels of each part on the device, uint8 (H, W, 3), or None where it cannot be decoded."""
        streams = []
        for content, box in parts:
            found = find_part(content, partial(_given, box))
            assert found, "workers have found this part before"
            streams.append(found[0])
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        decoded = self.decoder.decode(streams, params=self.params, cuda_stream=stream)
        if self.device.type == "cpu":  # to_dlpack() needs a GPU in any case
            return [None if image is None else torch.from_numpy(np.asarray(image)) for image in decoded]
        # Not copied: the memory is nvImageCodec's, which frees it in the order of the stream.
        return [None if image is None else torch.from_dlpack(image.to_dlpack(stream)) for image in decoded]


class BatchDecoder:
    """Decodes the batches that collate() makes.

    Args:
        size: height and width S of the images in a batch.
        fit: returns an image's chosen part, uint8 (H, W, 3), in that size: (pixels, whether to flip).
        path: returns the place of an image by its index, for messages.
        decode_parts: decodes the JPEGs, on its device.
    """

    def __init__(
        self,
        size: int,
        fit: Callable[[Tensor, bool], Tensor],
        path: Callable[[int], str],
        decode_parts: PartDecoder,
    ) -> None:
        self.size, self.fit, self.path, self.decode_parts = size, fit, path, decode_parts
        self.stream = torch.cuda.Stream(decode_parts.device) if decode_parts.device.type == "cuda" else None

    def __call__(self, batch: EncodedBatch) -> DecodedBatch:
        """Return the batch with decoded inputs: uint8, shape (B, S, S, 3), on the device."""
        if not self.stream:
            return self._decode(batch)
        # A GPU's JPEG engine writes when it is called, whatever its stream still has to do, and perhaps into the
        # memory of the last batch's images: wait until these have been read. Training's stream goes on meanwhile.
        self.stream.synchronize()
        with torch.cuda.stream(self.stream):
            decoded = self._decode(batch)
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_stream(self.stream)
        decoded[0].record_stream(current)  # its memory is of the other stream
        return decoded

    def _decode(self, batch: EncodedBatch) -> DecodedBatch:
        (content, plan), targets, size = batch[0], batch[1], self.size
        faults, are_damaged, device = list(batch[2]), list(batch[3]), self.decode_parts.device
        rows = [(index, bool(flip), CropBox(*box)) for index, _, flip, *box in plan.tolist()]
        contents = content.split(plan[:, 1].tolist())
        jpegs = {i: (contents[i].numpy(), box) for i, (_, _, box) in enumerate(rows) if box.width}
        decoded = dict(zip(jpegs, self.decode_parts([*jpegs.values()]), strict=True))
        result = torch.zeros(len(rows), size, size, 3, dtype=torch.uint8, device=device)
        for i, (index, is_flipped, box) in enumerate(rows):
            if i not in jpegs:
                # An assignment would wait for all work that is queued on the GPU.
                result[i].copy_(contents[i].view(size, size, 3), non_blocking=True)
                continue
            pixels = decoded[i]
            try:
                if pixels is None:  # a kind of JPEG that GPUs do not decode, or a damaged one
                    pixels = decode(jpegs[i][0].tobytes(), partial(_given, box)).to(device)
            except BAD_IMAGE as error:
                targets[i], are_damaged[i] = SKIPPED, True
                faults[i] = f"{self.path(index)} does not decode ({error})"
                continue
            result[i] = self.fit(pixels, is_flipped)
        return result, targets, faults, are_damaged, batch[4]


def _given(box: CropBox, width: int, height: int) -> CropBox:
    return box
