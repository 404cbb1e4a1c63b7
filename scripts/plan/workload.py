"""What a model is, counted on the meta device: parameters, arithmetic and activations, without memory or time."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from recipes.common.data import Data
from recipes.common.models.models import build_model
from recipes.common.optim import autocast, build_optimizer
from recipes.common.options import Options
from scripts.plan.model import Compute, Gradient, optimizer_bytes

BLOCK_BYTES = 25 * 2**20

SAMPLES = 2
"""A batch of one has no statistics for batch norm."""


@dataclass(frozen=True)
class Kind:
    """What a data set has, as far as a plan needs it."""

    channels: int
    image_size: int
    num_classes: int
    num_samples: int
    sample_bytes: int
    """Of one as it is read."""


def kind_of(args: Options, num_classes: int | None, samples: int | None) -> Kind:
    """Return what --data has: ImageNet's numbers for imagefolder, about 110 kB a picture, unless given."""
    known = {
        "digits": Kind(1, 8, 10, 1437, 64),
        "fashion-mnist": Kind(1, 28, 10, 60_000, 784),
        "cifar10": Kind(3, 32, 10, 50_000, 3072),
    }
    other = Kind(3, args.image_size, 1000, 1_281_167, 110_000)
    kind = known.get(args.data, other)
    return Kind(
        kind.channels,
        kind.image_size,
        num_classes or kind.num_classes,
        samples or kind.num_samples,
        kind.sample_bytes,
    )


def data_of(kind: Kind) -> Data:
    """Return a data set without samples: what a model has to fit."""
    nothing = cast(Any, None)
    return Data.of_images(nothing, nothing, kind.channels, kind.image_size, kind.num_classes)


@dataclass(frozen=True)
class Workload:
    """A model, as a plan sees it."""

    gradients: tuple[Gradient, ...]
    """In the order in which backward yields them."""
    buffer_bytes: int
    flops_per_sample: float
    """Forward and backward."""
    activation_bytes_per_sample: float
    """What forward keeps for backward, in fp32."""

    @property
    def parameters(self) -> int:
        """Their number."""
        return sum(gradient.numel for gradient in self.gradients)

    @property
    def parameter_bytes(self) -> int:
        """Of the weights."""
        return sum(gradient.nbytes for gradient in self.gradients)

    def state_bytes(self, args: Options) -> int:
        """Return the bytes of the optimizer's state."""
        shapes = [gradient.shape for gradient in self.gradients]
        return optimizer_bytes(shapes, args.optimizer, args.momentum)

    def checkpoint_bytes(self, args: Options) -> int:
        """Return the bytes of a checkpoint's tensors: weights, buffers, optimizer."""
        return self.parameter_bytes + self.buffer_bytes + self.state_bytes(args)

    def memory_bytes(self, args: Options, local_batch_size: float, ranks: int) -> dict[str, float]:
        """Return an estimate of a rank's memory by what takes it, without the libraries' own.

        Under --amp, half of the activations' bytes, and a half-precision copy of the weights.
        """
        half = args.amp != "none"
        passes = getattr(args, "accumulate_steps", 1)
        kept = self.activation_bytes_per_sample * local_batch_size / passes * (0.5 if half else 1.0)
        shards = max(1, ranks // getattr(args, "replicas", ranks))  # of fsdp; others hold weights whole
        is_resharded = getattr(args, "reshard_after_forward", False)
        # Of fsdp, gathered: two blocks, taken to be as large as DDP's buckets, or all.
        gathered = min(self.parameter_bytes, 2 * BLOCK_BYTES) if is_resharded else self.parameter_bytes
        return {
            "weights": self.parameter_bytes / shards + self.buffer_bytes,
            # Those of accumulated passes stay whole until the last.
            "gradients": self.parameter_bytes / (shards if passes == 1 else 1),
            "optimizer": self.state_bytes(args) / (ranks if getattr(args, "zero", False) else shards),
            "gathered_weights": gathered * (0.5 if half else 1.0) if shards > 1 else 0,
            "half_weights": self.parameter_bytes / 2 if half and shards == 1 else 0,
            "activations": kept,
        }


def look_at(args: Options, kind: Kind) -> Workload:
    """Return the workload of --model: one forward and backward pass in which nothing is computed."""
    with torch.device("meta"):
        model = build_model(args, data_of(kind)).train()
        images = torch.empty(SAMPLES, kind.channels, kind.image_size, kind.image_size)
        labels = torch.zeros(SAMPLES, dtype=torch.int64)
    parameters = {id(p) for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not (isinstance(tensor, nn.Parameter) or id(tensor) in parameters):
            kept[storage._cdata] = tensor  # held, so that the key stays its own
        return tensor

    own = {p.untyped_storage()._cdata for p in model.parameters()}
    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = cross_entropy(model(images), labels)
        saved = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)
        loss.backward()
    flops = {name: float(sum(ops.values())) for name, ops in counter.get_flop_counts().items()}
    return Workload(
        tuple(gradients_of(model, flops)),
        sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        counter.get_total_flops() / SAMPLES,
        saved / SAMPLES,
    )


def gradients_of(model: nn.Module, flops: dict[str, float]) -> list[Gradient]:
    """Return the gradients in the order of backward: the last layer's first.

    Backward's progress is measured by the arithmetic of the layers, whose share backward has of it is about the
    same in all of them. Layers without a count of their own (norms, biases) come with the layer after them.
    """
    root = type(model).__name__
    owners = [(name, module) for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    work = [_flops_of(name, root, flops) for name, _ in owners]
    for i, (name, _) in enumerate(owners):  # without what is counted for modules within it
        work[i] -= sum(
            w for w, (other, _) in zip(work, owners, strict=True) if name and other.startswith(f"{name}.")
        )
    total = sum(work) or 1.0
    gradients, done = [], 0.0
    for (_, module), own in reversed(list(zip(owners, work, strict=True))):
        done += max(own, 0.0)
        ready = min(1.0, done / total)
        found = reversed(list(module.parameters(recurse=False)))
        gradients += [Gradient(tuple(p.shape), ready, p.element_size()) for p in found if p.requires_grad]
    return gradients


def _flops_of(name: str, root: str, flops: dict[str, float]) -> float:
    return flops.get(f"{root}.{name}" if name else root, 0.0)


class TimedStep:
    """A step of one process on random images, without data or exchange."""

    def __init__(self, args: Options, kind: Kind, local_batch_size: int, device: torch.device) -> None:
        self.args, self.device = args, device
        self.model = build_model(args, data_of(kind)).to(device).train()
        self.optimizer = build_optimizer(args, self.model.parameters())
        images = torch.randn((local_batch_size, kind.channels, kind.image_size, kind.image_size), device=device)
        self.images = images.contiguous(memory_format=torch.channels_last) if args.channels_last else images
        self.labels = torch.arange(local_batch_size, device=device) % kind.num_classes

    def now(self) -> float:
        """Return the time, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __call__(self) -> tuple[float, float, float]:
        """Do a step; return the seconds of forward, backward and optimizer."""
        begin = self.now()
        with autocast(self.args, self.device):
            loss = cross_entropy(self.model(self.images), self.labels)
        computed = self.now()
        loss.backward()
        ready = self.now()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return computed - begin, ready - computed, self.now() - ready


def measure_compute(args: Options, kind: Kind, local_batch_size: int, device: torch.device) -> Compute:
    """Return the median times of a few steps of one process on this device, on random images.

    Steps of half as many samples tell what does not depend on their number.
    """
    whole = _measure_steps(args, kind, local_batch_size, device)
    if local_batch_size < 4:  # half of it has no statistics for batch norm
        return whole
    half = _measure_steps(args, kind, local_batch_size // 2, device)
    part = local_batch_size // 2 / local_batch_size
    whole_s, half_s = (compute.forward_s + compute.backward_s for compute in (whole, half))
    fixed_s = (half_s - part * whole_s) / (1 - part)
    return replace(whole, fixed_share=min(1.0, max(0.0, fixed_s / whole_s)))


def _measure_steps(args: Options, kind: Kind, local_batch_size: int, device: torch.device) -> Compute:
    step = TimedStep(args, kind, local_batch_size, device)
    times: list[tuple[float, float, float]] = []
    began_at = time.perf_counter()
    while len(times) < 5 or (len(times) < 20 and time.perf_counter() < began_at + 10):
        times.append(step())
    del times[:2]  # caches warm up
    return Compute(*(statistics.median(values) for values in zip(*times, strict=True)))


def estimate_compute(workload: Workload, local_batch_size: int, tflops: float, utilisation: float) -> float:
    """Return the seconds of forward and backward at a share of a GPU's peak."""
    seconds = workload.flops_per_sample * local_batch_size / (tflops * 1e12 * utilisation)
    assert math.isfinite(seconds)
    return seconds
