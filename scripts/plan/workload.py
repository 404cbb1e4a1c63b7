"""What a model is, counted on the meta device: parameters, arithmetic and activations, without memory or time."""

from __future__ import annotations

import contextlib
import itertools
import sys
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

from recipes.common.arguments import is_user_code
from recipes.common.data import Data, load_data
from recipes.common.data.workers import LoadedSplit
from recipes.common.models.models import compile_forward, make_model
from recipes.common.optim import autocast, build_optimizer
from recipes.common.options import TEXTS, Options
from recipes.common.seeding import choose_kernels
from recipes.common.task import Classification
from recipes.common.user_code import call_user_code
from recipes.common.world.peers import Peers, local_tensor
from recipes.tensor.plans import parallelize
from scripts.plan.cost_model import BLOCK_BYTES, Compute, Gradient, Method

SAMPLES = 2
"""Samples of the counted pass: batch norm has no statistics in a batch of one."""

DATA_SETS = {"digits": (1, 8, 10, 1437), "fashion-mnist": (1, 28, 10, 60_000), "cifar10": (3, 32, 10, 50_000)}
"""Channels, image size, classes and training samples."""


@dataclass(frozen=True)
class Kind:
    """What a plan needs to know about a data set."""

    data: Data  # for images, without the samples
    num_samples: int
    sample_bytes: int  # of a sample that is read in a step; 0: samples are on the device


def kind_of(args: Options, num_classes: int | None = None, samples: int | None = None) -> Kind:
    """Return the Kind of --data; folders and shards of images have ImageNet's numbers, unless they are given."""
    if args.data in TEXTS or is_user_code(args.data):
        data = load_data(args, torch.device("cpu"), print)
        sample_bytes = data.input.zeros(1).nbytes if isinstance(data.train, LoadedSplit) else 0
        return Kind(data, samples or len(data.train), sample_bytes)
    count = args.num_samples if args.data == "synthetic" else 1_281_167
    channels, image_size, classes, count = DATA_SETS.get(args.data, (3, args.image_size, min(1000, count), count))
    sample_bytes = 110_000 if args.data in ("imagefolder", "shards") else 0  # about one image of ImageNet
    nothing = cast(Any, None)
    data = Data.of_images(nothing, nothing, channels, image_size, num_classes or classes)
    return Kind(replace(data, task=Classification()), samples or count, sample_bytes)


@dataclass(frozen=True)
class Workload:
    """What a plan needs to know about a model."""

    gradients: tuple[Gradient, ...]  # in the order in which backward yields them
    buffer_bytes: int  # including weights that are not trained
    flops_per_sample: float  # forward and backward
    convolution_share: float  # of the operations
    activation_bytes_per_sample: float  # what forward keeps for backward, in fp32
    sums_bytes_per_sample: tuple[float, ...] = ()  # of tensor's all-reduces, in fp32; forward's half first
    whole: Workload | None = None  # for tensor: the model that this is a rank's part of

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(gradient.numel for gradient in self.gradients)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the trained parameters."""
        return sum(gradient.nbytes for gradient in self.gradients)

    def tensors(self, args: Options) -> int:
        """Return the number of tensors that fsdp gathers: the weights, and the same number of each moment."""
        return len(self.gradients) * (1 + (2 if args.optimizer == "adamw" else bool(args.momentum)))

    def state_bytes(self, args: Options) -> int:
        """Return the bytes of the optimizer's state: the momentum, or two moments and a count for each tensor."""
        if args.optimizer == "adamw":
            return 2 * self.parameter_bytes + 4 * len(self.gradients)
        return self.parameter_bytes if args.momentum else 0

    def checkpoint_bytes(self, args: Options, shards: int = 1) -> int:
        """Return the bytes of weights, buffers and optimizer state; with shards, those of rank 0's rows."""
        shapes = [(-(-one.shape[0] // shards), *one.shape[1:]) if one.shape else () for one in self.gradients]
        own = [replace(one, shape=shape) for one, shape in zip(self.gradients, shapes, strict=True)]
        part = replace(self, gradients=tuple(own))
        return part.parameter_bytes + self.buffer_bytes + part.state_bytes(args)

    def sums_bytes(self, method: Method, local_batch_size: float) -> tuple[float, ...]:
        """Return the bytes of each all-reduce of tensor's layers in a step: forward's, then backward's."""
        passes, middle = method.accumulate_steps, len(self.sums_bytes_per_sample) // 2
        half = 1.0 if method.amp == "none" else 0.5  # autocast leaves the gradients of layers' inputs in fp32
        sizes = [nbytes * local_batch_size / passes for nbytes in self.sums_bytes_per_sample]
        return (*(half * nbytes for nbytes in sizes[:middle] * passes), *sizes[middle:] * passes)

    def memory_bytes(self, args: Options, method: Method, local_batch_size: float, ranks: int) -> dict[str, float]:
        """Estimate a rank's memory by purpose, without the libraries' own."""
        whole, shards, passes = self.parameter_bytes, method.shards(ranks), method.accumulate_steps
        half, summed_by = 1.0 if method.amp == "none" else 0.5, ranks // method.tensor_parallel
        # fsdp gathers two blocks, assumed to be as large as DDP's buckets, or all of them.
        gathered = min(whole, 2 * BLOCK_BYTES) if method.reshard_after_forward else whole
        return {
            "weights": whole / shards + self.buffer_bytes,
            "gradients": whole / (shards if passes == 1 else 1),  # accumulated: whole until the last pass
            "optimizer": self.state_bytes(args) / (ranks if method.zero else shards),
            "gathered_weights": gathered * half if shards > 1 else 0,
            "half_weights": whole / 2 if half < 1 and shards == 1 else 0,  # --amp's copy
            # tensor's buckets, in addition to the gradients.
            "gradient_sums": whole if method.recipe == "tensor" and summed_by > 1 else 0,
            "activations": self.activation_bytes_per_sample * local_batch_size / passes * half,
        }


class AllReduceBytes(TorchDispatchMode):
    """Records the bytes of all-reduces in a pass, and makes only a rank's own part of split tensors count."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.nbytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def count_workload(args: Options, kind: Kind) -> Workload:
    """Count the workload of --model (for tensor, a rank's); raises UserError if it does not fit data or ranks."""
    with torch.device("meta"):
        model = make_model(args, kind.data).train()  # without build_model()'s samples: kind has none of images
    whole = call_user_code(f"--model {args.model}, on tensors without data,", count_pass, model, kind.data)
    if (ranks := getattr(args, "tensor_parallel", 1)) == 1:
        return whole
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        parallelize(model, args.model, DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("tp",)))
        count_pass(model, kind.data)  # the first pass also computes the shapes of split tensors: do not count it
        return replace(count_pass(model, kind.data), whole=whole)
    finally:
        dist.destroy_process_group()


def count_pass(model: nn.Module, data: Data) -> Workload:
    """Count a forward and a backward pass on the meta device."""
    inputs, targets = data.input.zeros(SAMPLES, "meta"), data.target.zeros(SAMPLES, "meta")
    own = {local_tensor(parameter).untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    done: dict[Tensor, int] = {}  # operations until a gradient is ready, in the order of backward

    def keep(tensor: Tensor) -> Tensor:
        part = local_tensor(tensor)
        kept[part.untyped_storage()._cdata] = part  # held, so that its key is not reused
        return tensor

    def note(parameter: Tensor) -> None:
        done[parameter] = counter.get_total_flops()

    counter, sums = FlopCounterMode(display=False), AllReduceBytes()
    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with contextlib.ExitStack() as hooks, counter, sums, saved:
        for parameter in trained:
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(note))
        loss = data.task.loss_sum(model(inputs), targets)
        forward = counter.get_total_flops()
        loss.backward()
    flops = counter.get_total_flops()
    backward, ops = max(1, flops - forward), counter.get_flop_counts().get("Global", {})
    for parameter in trained:
        done.setdefault(parameter, flops)  # unused parameters
    return Workload(
        tuple(
            Gradient(local_tensor(x).shape, (at - forward) / backward, x.element_size()) for x, at in done.items()
        ),
        sum(x.nbytes for x in (*model.buffers(), *model.parameters()) if x not in done),
        flops / SAMPLES,
        sum(count for op, count in ops.items() if "convolution" in str(op)) / max(1, flops),
        sum(part.untyped_storage().nbytes() for key, part in kept.items() if key not in own) / SAMPLES,
        tuple(nbytes / SAMPLES for nbytes in sums.nbytes),
    )


def timed_step(args: Options, kind: Kind, samples: int, device: torch.device) -> Callable[[], list[float]]:
    """Return a function that does a step on random numbers, and returns the seconds of each of its three parts."""
    model = make_model(args, kind.data).to(device).train()
    optimizer = build_optimizer(args, model, Peers(device))
    spec, targets = kind.data.input, kind.data.target.zeros(samples, device)
    inputs = torch.rand((samples, *spec.shape), device=device).to(spec.dtype)  # tokens: all 0
    if args.channels_last and inputs.ndim == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        model.to(memory_format=torch.channels_last)
    if args.compile:
        from recipes.common.compiled_code import check_compiler

        check_compiler(device)
    compile_forward(model, args)
    choose_kernels(args)

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
    """Return the median times of a few steps of one process on this device, on random numbers."""

    def measure(samples: int) -> Compute:
        times: list[list[float]] = []
        do_step, end = timed_step(args, kind, samples, device), time.perf_counter() + 10
        while len(times) < 5 or (len(times) < 20 and time.perf_counter() < end):
            times.append(call_user_code(f"--measure of {samples} samples", do_step))
            if len(times) == 1 and sum(times[0]) > 2:  # the others may take minutes
                text = f"measuring: a step of {samples} samples takes {sum(times[0]):.1f} s; four more follow"
                print(text, file=sys.stderr, flush=True)
        return Compute(*(median(values[2:]) for values in zip(*times, strict=True)))  # the first two warm up

    # Half as many samples show which part of the time does not depend on their number.
    whole, less = measure(local_batch_size), local_batch_size // 2
    if less < SAMPLES:
        return whole
    part = less / local_batch_size
    whole_s, part_s = (compute.forward_s + compute.backward_s for compute in (whole, measure(less)))
    fixed_s = (part_s - part * whole_s) / (1 - part)
    return replace(whole, fixed_share=min(1.0, max(0.0, fixed_s / whole_s)))
