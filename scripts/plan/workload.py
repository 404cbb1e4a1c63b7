"""What a model is, counted on the meta device: parameters, arithmetic and activations, without memory or time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from recipes.common.data import Data, load_data
from recipes.common.models.models import build_model
from recipes.common.optim import autocast, build_optimizer
from recipes.common.options import Options, is_reference
from recipes.common.task import Classification
from recipes.tensor.plans import parallelize
from scripts.plan.model import Compute, Gradient, Method

BLOCK_BYTES = 25 * 2**20

SAMPLES = 2
"""A batch of one has no statistics for batch norm."""

KNOWN = {
    "digits": (1, 8, 10, 1437, 64),
    "fashion-mnist": (1, 28, 10, 60_000, 784),
    "cifar10": (3, 32, 10, 50_000, 3072),
}
"""Channels, image size, classes, training samples, and bytes of one as it is read."""


@dataclass(frozen=True)
class Kind:
    """A data set, as far as a plan needs it."""

    data: Data  # of images without the samples
    num_samples: int
    sample_bytes: int  # of one as it is read


def kind_of(args: Options, num_classes: int | None, samples: int | None) -> Kind:
    """Return what --data has: ImageNet's numbers for imagefolder, about 110 kB a picture, unless given."""
    if args.data == "text" or is_reference(args.data):
        data = load_data(args, torch.device("cpu"), print)
        sample_bytes = args.seq_len if args.data == "text" else data.input.zeros(1).nbytes
        return Kind(data, samples or len(data.train), sample_bytes)
    found = KNOWN.get(args.data, (3, args.image_size, 1000, 1_281_167, 110_000))
    channels, image_size, classes, count, sample_bytes = found
    nothing = cast(Any, None)
    data = Data.of_images(nothing, nothing, channels, image_size, num_classes or classes)
    return Kind(replace(data, task=Classification()), samples or count, sample_bytes)


@dataclass(frozen=True)
class Workload:
    """A model, as a plan sees it."""

    gradients: tuple[Gradient, ...]  # in the order in which backward yields them
    buffer_bytes: int
    flops_per_sample: float  # forward and backward
    activation_bytes_per_sample: float  # what forward keeps for backward, in fp32
    sums_bytes_per_sample: tuple[float, ...] = ()  # of tensor's all-reduces, in fp32; half of them are forward's
    whole: Workload | None = None  # of tensor: the model of which this is a rank's part

    @property
    def parameters(self) -> int:
        """Their number."""
        return sum(gradient.numel for gradient in self.gradients)

    @property
    def parameter_bytes(self) -> int:
        """Of the weights."""
        return sum(gradient.nbytes for gradient in self.gradients)

    def state_bytes(self, args: Options) -> int:
        """Return the bytes of the optimizer's state: the momentum, or two moments and a count for each tensor."""
        if args.optimizer == "adamw":
            return 2 * self.parameter_bytes + 4 * len(self.gradients)
        return self.parameter_bytes if args.momentum else 0

    def checkpoint_bytes(self, args: Options, shards: int = 1) -> int:
        """Return the bytes of weights, buffers and optimizer; in shards, of the rows of rank 0."""
        shapes = [(-(-one.shape[0] // shards), *one.shape[1:]) if one.shape else () for one in self.gradients]
        own = [replace(one, shape=shape) for one, shape in zip(self.gradients, shapes, strict=True)]
        part = replace(self, gradients=tuple(own))
        return part.parameter_bytes + self.buffer_bytes + part.state_bytes(args)

    def sums_bytes(self, method: Method, local_batch_size: float) -> tuple[float, ...]:
        """Return the bytes of each all-reduce of tensor's layers in a step: forward's, then backward's.

        Autocast makes forward's activations half as long, and leaves the gradients of layers' inputs in fp32.
        """
        passes, middle = method.accumulate_steps, len(self.sums_bytes_per_sample) // 2
        half = 1.0 if method.amp == "none" else 0.5
        sizes = [nbytes * local_batch_size / passes for nbytes in self.sums_bytes_per_sample]
        return (*(half * nbytes for nbytes in sizes[:middle] * passes), *sizes[middle:] * passes)

    def memory_bytes(
        self, args: Options, method: Method, local_batch_size: float, ranks: int
    ) -> dict[str, float]:
        """Return an estimate of a rank's memory by what takes it, without the libraries' own.

        Under --amp, half of the activations' bytes, and a half-precision copy of the weights.
        """
        whole, shards, passes = self.parameter_bytes, method.shards(ranks), method.accumulate_steps
        half = 1.0 if method.amp == "none" else 0.5
        # Of fsdp, gathered: two blocks, taken to be as large as DDP's buckets, or all.
        gathered = min(whole, 2 * BLOCK_BYTES) if method.reshard_after_forward else whole
        return {
            "weights": whole / shards + self.buffer_bytes,
            "gradients": whole / (shards if passes == 1 else 1),  # accumulated ones stay whole until the last pass
            "optimizer": self.state_bytes(args) / (ranks if method.zero else shards),
            "gathered_weights": gathered * half if shards > 1 else 0,
            "half_weights": whole / 2 if half < 1 and shards == 1 else 0,
            # Tensor's buckets, until backward is done.
            "gradient_sums": whole if method.recipe == "tensor" and method.tensor_parallel < ranks else 0,
            "activations": self.activation_bytes_per_sample * local_batch_size / passes * half,
        }


class Sums(TorchDispatchMode):
    """Notes the bytes of all-reduces within a pass, and lets a rank's part of what is split count alone."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.nbytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def look_at(args: Options, kind: Kind) -> Workload:
    """Return the workload of --model, of tensor that of a rank: passes in which nothing is computed or sent.

    Raises:
        UserError: the model cannot be split over --tensor-parallel ranks.
    """
    with torch.device("meta"):
        model = build_model(args, kind.data).train()
    whole, ranks = count_pass(model, kind.data), getattr(args, "tensor_parallel", 1)
    if ranks == 1:
        return whole
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        parallelize(model, args.model, DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("tp",)))
        count_pass(model, kind.data)  # in the first one, torch also computes the shapes of all that is split
        return replace(count_pass(model, kind.data), whole=whole)
    finally:
        dist.destroy_process_group()


def own_part(tensor: Tensor) -> Tensor:
    """Return what a rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def count_pass(model: nn.Module, data: Data) -> Workload:
    """Return what a forward and a backward pass on the meta device amount to."""
    inputs, targets = data.input.zeros(SAMPLES, "meta"), data.target.zeros(SAMPLES, "meta")
    own = {own_part(parameter).untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        part = own_part(tensor)
        kept[part.untyped_storage()._cdata] = part  # held, so that the key stays its own
        return tensor

    counter, sums = FlopCounterMode(display=False), Sums()
    with counter, sums, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        data.task.loss_sum(model(inputs), targets).backward()
    return Workload(
        tuple(gradients_of(model, {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()})),
        sum(buffer.nbytes for buffer in model.buffers()),
        counter.get_total_flops() / SAMPLES,
        sum(part.untyped_storage().nbytes() for key, part in kept.items() if key not in own) / SAMPLES,
        tuple(nbytes / SAMPLES for nbytes in sums.nbytes),
    )


def gradients_of(model: nn.Module, flops: dict[str, int]) -> list[Gradient]:
    """Return the gradients in the order of backward: the last layer's first.

    Backward's progress is measured by the arithmetic of the layers, whose share backward has of it is about the
    same in all of them. Layers without a count of their own (norms, biases) come with the layer after them.
    """
    root = type(model).__name__
    owners = {name: list(module.parameters(recurse=False)) for name, module in model.named_modules()}
    work = {name: flops.get(f"{root}.{name}" if name else root, 0) for name, own in owners.items() if own}
    for name in work:  # without what is counted for modules within it
        work[name] -= sum(own for other, own in work.items() if name and other.startswith(f"{name}."))
    found: dict[nn.Parameter, Gradient] = {}
    done = 0
    for name in reversed(work):
        done += max(work[name], 0)
        for parameter in reversed(owners[name]):
            found.pop(parameter, None)  # of a tied one, the gradient is there after its last use
            ready = min(1.0, done / (sum(work.values()) or 1))
            found[parameter] = Gradient(tuple(own_part(parameter).shape), ready, parameter.element_size())
    return [gradient for parameter, gradient in found.items() if parameter.requires_grad]


def timed_step(args: Options, kind: Kind, samples: int, device: torch.device) -> Callable[[], list[float]]:
    """Return a step of one process on random numbers, without data or exchange.

    It returns the seconds of forward, backward and optimizer.
    """
    model = build_model(args, kind.data).to(device).train()
    optimizer = build_optimizer(args, model.parameters())
    spec, targets = kind.data.input, kind.data.target.zeros(samples, device)
    inputs = torch.rand((samples, *spec.shape), device=device).to(spec.dtype)  # tokens: all 0
    inputs = inputs.contiguous(memory_format=torch.channels_last) if args.channels_last else inputs

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def do_step() -> list[float]:
        times = [now()]
        with autocast(args, device):
            loss = kind.data.task.loss_sum(model(inputs), targets) / samples
        times.append(now())
        loss.backward()
        times.append(now())
        optimizer.step()
        optimizer.zero_grad()
        times.append(now())
        return [end - begin for begin, end in itertools.pairwise(times)]

    return do_step


def measure_compute(args: Options, kind: Kind, local_batch_size: int, device: torch.device) -> Compute:
    """Return the median times of a few steps of one process on this device, on random numbers.

    Steps of half as many samples tell what does not depend on their number.
    """

    def measure(samples: int) -> Compute:
        times: list[list[float]] = []
        do_step, end = timed_step(args, kind, samples, device), time.perf_counter() + 10
        while len(times) < 5 or (len(times) < 20 and time.perf_counter() < end):
            times.append(do_step())
        return Compute(*(median(values[2:]) for values in zip(*times, strict=True)))  # caches warm up

    whole, less = measure(local_batch_size), local_batch_size // 2
    if less < SAMPLES:
        return whole
    part = less / local_batch_size
    whole_s, part_s = (compute.forward_s + compute.backward_s for compute in (whole, measure(less)))
    fixed_s = (part_s - part * whole_s) / (1 - part)
    return replace(whole, fixed_share=min(1.0, max(0.0, fixed_s / whole_s)))
