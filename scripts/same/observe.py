"""Run a training script as one rank, with hooks on torch that record what it does in each step.

    SAME_FOLDER=/tmp/trace torchrun --nproc-per-node=2 -m scripts.same.observe train.py --batch-size 24

`make same` starts it in each process. The script needs no change. Each line of rank0.jsonl is an event, such as an
optimizer step with its samples, gradients and weights, or an evaluation. Tensors are recorded as sketches: sums
over 61 interleaved parts. Sketches are linear, so a factor between tensors is also one between their sketches.

Randomness that may differ between world sizes is removed: dropout is off, and the global random generators are
seeded by rank before the script begins, and by a sample's index while the data set returns it.

Variables: SAME_FOLDER, where to write; SAME_CONTROL=1 reverses each training batch (without a DataLoader: rounds
gradients differently) to measure rounding; SAME_OTHER_DRAWS=1 lets each step draw other random numbers;
SAME_REPLAY, a JSON file with the batches to draw, by loader iteration; SAME_STOP_AFTER=N ends the process after N
optimizer steps. It sets SAME_REPORT, the file for a script's metrics.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import random
import runpy
import sys
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn._reduction import legacy_get_string
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, _utils, dataloader, get_worker_info

SKETCH_SIZE = 61
Function = Callable[..., Any]

MAX_FEATURES = 4096
"""A fingerprint reads evenly spaced elements of a sample, fewer than twice this many."""

RANDOM_SAMPLES = 64
"""Number of samples, and of batches, that a process checks for drawing random numbers, until one does.

A check takes 2 ms.
"""

MAX_DEPTH = 3
"""How deep attributes of objects are searched for a batch, if the arguments have no tensor."""

COLLECTIVES = (
    *("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather", "all_gather_object"),
    *("gather_object", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_reduce_coalesced", "batch_isend_irecv"),
)
GATHERS = ("all_gather", "all_gather_into_tensor", "gather")
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def sketch(tensor: Tensor) -> Tensor:
    """Return the sums over every 61st element of a tensor of any shape: (61,), float64, on the CPU."""
    flat = tensor.detach()
    if flat.layout != torch.strided:
        flat = flat.to_dense()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.flatten()
    padded = torch.zeros(-(-flat.numel() // SKETCH_SIZE) * SKETCH_SIZE, dtype=torch.float64, device=flat.device)
    padded[: flat.numel()] = flat
    return padded.view(-1, SKETCH_SIZE).sum(dim=0).cpu()


def sketch_all(tensors: Iterable[Tensor | None]) -> list[float]:
    """Return the sum of the sketches of tensors, each rotated according to its position; None counts as zero."""
    sketches = [sketch(tensor).roll(7 * i) for i, tensor in enumerate(tensors) if tensor is not None]
    return sum(sketches, torch.zeros(SKETCH_SIZE, device="cpu")).tolist()


def local_tensor(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, and anything else as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def fingerprints(batch: Tensor) -> list[str]:
    """Return a fingerprint of each sample's content; samples are along the first dimension.

    Zeros at the end of a sample's dimensions, which may pad it to the longest one of its batch, do not count.
    """
    samples = batch.detach() if batch.dim() > 1 else batch.detach().unsqueeze(1)
    found = weighted_sums(samples)
    if samples.dim() == 2 and samples.shape[1] < 2 * MAX_FEATURES:  # all elements are read, and zeros add nothing
        return found
    ends = [samples.movedim(dim, 1)[:, -1:].bool().flatten(1).any(1) for dim in range(1, samples.dim())]
    for i in torch.stack(ends).all(0).logical_not().nonzero().flatten().tolist():
        found[i : i + 1] = weighted_sums(without_padding(samples[i])[None])
    return found


def without_padding(sample: Tensor) -> Tensor:
    """Return a sample without the slices at the end of each dimension that are all zeros."""
    filled = sample.bool()[..., None]
    slices = [filled.transpose(0, dim).flatten(1).any(1).nonzero().flatten() for dim in range(sample.dim())]
    return sample[tuple(slice(max(places.tolist(), default=-1) + 1) for places in slices)]


def weighted_sums(samples: Tensor) -> list[str]:
    """Return for each sample a sum of evenly spaced elements, weighted by their places, and its inner shape."""
    rows = samples.flatten(1)
    step = max(1, rows.shape[1] // MAX_FEATURES)
    places = torch.arange(0, rows.shape[1], step, dtype=torch.float64, device=rows.device)
    sums = (rows[:, ::step].double() * torch.cos(places + 1)).sum(dim=1).tolist()
    return [" ".join([f"{value:.9e}", *map(str, samples.shape[2:])]) for value in sums]


def find_batch(values: Iterable[Any], counts: Sequence[int], depth: int = 0) -> list[Tensor]:
    """Return the first tensor with a batch dimension in nested values, or those of a list of samples.

    `counts` are the numbers of samples that such a list may have; `depth` is how deep to look into objects, such
    as a batch of graphs.
    """
    return next(filter(None, (batch_in(value, counts, depth) for value in values)), [])


def batch_in(value: Any, counts: Sequence[int], depth: int) -> list[Tensor]:
    """Return what find_batch() returns, for one value."""
    if isinstance(value, Tensor):
        return [value] if value.dim() else []
    if isinstance(value, Mapping):
        return find_batch(value.values(), counts, depth)
    if isinstance(value, list | tuple):
        return samples_in(value, counts) or find_batch(value, counts, depth)
    if depth and not isinstance(value, nn.Module):
        return find_batch(getattr(value, "__dict__", {}).values(), counts, depth - 1)
    return []


def samples_in(items: Sequence[Any], counts: Sequence[int]) -> list[Tensor]:
    """Return the first tensor of each item of a list of samples, as (1, ...); [] for another list."""
    is_list = type(items) in (list, tuple) and len(items) in counts  # no PackedSequence
    if not is_list or not all(isinstance(item, Tensor | Mapping) for item in items):
        return []
    tensors = [tensor for item in items for tensor in batch_in(item, (), 0)]
    # Each of several inputs has as many rows as the batch has samples; so has each of three images with 3 colors.
    are_inputs = all(len(tensor) in counts and (tensor.dim(), len(tensor)) != (3, 3) for tensor in tensors)
    return [] if are_inputs or len(tensors) != len(items) else [tensor[None] for tensor in tensors]


def has_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor cannot be read: on the meta device, or within torch.func.vmap() or grad()."""
    return tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_redirected(module: nn.Module) -> bool:
    """Return whether a call of a module runs Lightning's training_step(), which one process runs by itself."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    return getattr(vars(inner).get("forward"), "__name__", "") == "wrapped_forward"


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators on the CPU."""
    return {"torch": torch.get_rng_state().numpy(), "random": random.getstate(), "numpy": np.random.get_state()}


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the states that random_states() returned."""
    torch.set_rng_state(torch.from_numpy(states["torch"]))
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])


def seed_generators(seed: int) -> None:
    """Seed the global random generators on the CPU."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def checksums(states: dict[str, Any] | None = None) -> dict[str, int]:
    """Return a checksum of each generator's state (default: the current states)."""
    return {name: zlib.crc32(pickle.dumps(state)) for name, state in (states or random_states()).items()}


def step_checksums() -> dict[str, int]:
    """Return the checksums of the global generators, also of those on GPUs, which are initialised by then."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return checksums({**random_states(), "cuda": [state.numpy() for state in on_gpus]})


def is_called_by(*names: str) -> bool:
    """Return whether a function with one of these names is under way."""
    return any(frame.f_code.co_name in names for frame, _ in traceback.walk_stack(None))


def makes_state() -> bool:
    """Return whether the optimizer's step under way only makes its state, for one to be loaded into it."""
    # torch.distributed.checkpoint's, Horovod's
    return is_called_by("_init_optim_state", "broadcast_optimizer_state")


class Observer:
    """What this process has done since the last optimizer step, and the file where steps are recorded."""

    def __init__(self, folder: Path, rank: int) -> None:
        # Workers of a DataLoader inherit the descriptor; O_APPEND keeps their lines whole.
        self.file = os.open(folder / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.is_control = bool(os.environ.get("SAME_CONTROL"))
        self.is_redrawn = bool(os.environ.get("SAME_OTHER_DRAWS"))
        replay = os.environ.get("SAME_REPLAY")
        self.replay: dict[str, list[list[int]]] = json.loads(Path(replay).read_text()) if replay else {}
        self.stop_after = int(os.environ.get("SAME_STOP_AFTER", "0"))
        self.stepping: list[Optimizer] = []  # if one wraps another, the outer one comes first
        self.optimizers: list[Optimizer] = []
        self.steps = self.call_depth = 0
        self.iterations, self.iteration, self.trained = 0, -1, -1
        # Of the last two batches, 0 if unknown: a script may draw one while it trains on the one before.
        self.batch_sizes = deque[int](maxlen=2)
        self.unchecked = self.unchecked_batches = RANDOM_SAMPLES
        self.uses_batch_norm = self.uses_dropout = False
        self.autocast: torch.dtype | None = None
        self.start_step()
        self.start_evaluation()

    def start_step(self) -> None:
        """Reset what is recorded for a step."""
        self.model: int | None = None
        self.record: dict[str, Any] = {"rows": [], "synced_forwards": 0, "unsynced_forwards": 0, "random": None}
        self.record |= {"averaged": [], "contrasted": 0, "gathered": False}

    def start_evaluation(self) -> None:
        """Reset what is recorded for an evaluation."""
        self.evaluation_model: nn.Module | None = None
        self.evaluated: dict[int, list[str]] = {}  # by loader iteration: several sets may be evaluated in turn
        self.collectives = 0
        self.is_trimmed = False  # whether accelerate has dropped the samples that pad the last batch
        self.targets: list[int] = []  # over how many each loss is
        self.before_batch: tuple[dict[int, int], int] = {}, 0  # samples and collectives before the last batch

    def write(self, event: str, **fields: Any) -> None:
        """Append an event to the file."""
        os.write(self.file, (json.dumps({"event": event, **fields}) + "\n").encode())

    # Optimizers

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Capture gradients and weights, or, if step() has a closure, make the closure capture them."""
        self.stepping.append(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.capture()
            return None

        def observed() -> Any:
            result = closure()
            self.capture()
            return result

        return (optimizer, observed, *args[2:]), {name: kwargs[name] for name in kwargs if name != "closure"}

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the optimizer that steps (of the outer one if one wraps another)."""
        return [parameter for group in self.stepping[0].param_groups for parameter in group["params"]]

    def capture(self) -> None:
        """Keep what the step uses; a later call, by an inner optimizer with exchanged gradients, replaces it."""
        gradients = [local_tensor(parameter.grad) for parameter in self.parameters()]
        parameters = [*map(local_tensor, self.parameters())]
        if self.is_control and self.iteration < 0:
            self.round_differently(gradients)
        shapes = [list(parameter.shape) for parameter in parameters]
        drawn = self.record["random"]
        self.record |= {
            "lr": [float(group["lr"]) for group in self.stepping[0].param_groups if "lr" in group],
            "weights": sketch_all(parameters),
            "final": sketch_all(gradients),
            "missing": [i for i, gradient in enumerate(gradients) if gradient is None],
            "shapes": zlib.crc32(json.dumps(shapes).encode()),
            "low_precision": self.low_precision(parameters),
            "moved": [name for name, state in step_checksums().items() if drawn and state != drawn[name]],
        }

    def low_precision(self, parameters: Sequence[Tensor]) -> str:
        """Return the lowest precision in use: autocast's, TF32 or the parameters'."""
        precision = self.autocast or parameters[0].dtype
        if precision == torch.float32 and parameters[0].device.type == "cuda":
            # allow_tf32 cannot be read once a script has set fp32_precision.
            used = {torch.backends.cuda.matmul.fp32_precision}
            if any(parameter.ndim > 3 for parameter in parameters):  # a convolution's
                used.add(torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]
            if "tf32" in used:
                return "tf32"
        return str(precision).removeprefix("torch.")

    def round_differently(self, gradients: list[Tensor | None]) -> None:
        """Change gradients by about one rounding error at the scale of their tensor; by more under autocast.

        Autocast rounds far more than the gradient's own dtype, which turns signs in Adam's first updates. The
        effect grows with the square root of the change: 1e-4 sqrt(eps), 1/300 of the floor in checks.py, shows it.
        """
        generator = torch.Generator().manual_seed(self.steps)
        for gradient in gradients:
            if gradient is not None:
                own = gradient.detach()
                own = own._values() if own.is_sparse else own
                noise = torch.randn(own.shape, generator=generator).to(own)
                scale = own.abs() + own.norm() / max(1, own.numel()) ** 0.5
                share = torch.finfo(own.dtype).eps
                if self.autocast:
                    share = max(share, 1e-4 * torch.finfo(self.autocast).eps ** 0.5)
                own.add_(noise * scale * share)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Write the step's event once the outer optimizer has finished."""
        # A rank may have no samples, and no gradient before the optimizer exchanges them.
        is_step = any(self.record["rows"]) or any(self.record.get("final", ())) or not makes_state()
        if len(self.stepping) == 1 and is_step:
            if optimizer not in self.optimizers:
                self.optimizers.append(optimizer)
            self.steps += 1
            self.write(
                "step",
                optimizer=self.optimizers.index(optimizer),
                **self.record,
                after=sketch_all(map(local_tensor, self.parameters())),
                batch_norm=self.uses_batch_norm,
                dropout=self.uses_dropout,
                iteration=self.iteration,
            )
            self.start_step()
            if self.steps == self.stop_after:
                sys.stdout.flush()
                os._exit(0)
        self.stepping.pop()

    # Models

    def call(self, original: Function, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module; if it is an outermost one with parameters, note the samples that it receives."""
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        if isinstance(module, nn.RNNBase) and module.dropout:
            self.uses_dropout, module.dropout = True, 0.0
        if isinstance(module, _BatchNorm) and module.training and not isinstance(module, nn.SyncBatchNorm):
            self.uses_batch_norm = True
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
            kind = "synced_forwards" if module.require_backward_grad_sync else "unsynced_forwards"
            self.record[kind] += 1
        if self.call_depth == 0 and is_redirected(module):
            return original(module, *args, **kwargs)
        if self.call_depth == 0 and next(module.parameters(), None) is not None:
            self.see_batch(module, (args, kwargs))
        self.call_depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self.call_depth -= 1

    def see_batch(self, module: nn.Module, arguments: Any) -> None:
        """Note a batch's samples for training or evaluation, only for the first module that each of them calls."""
        values = [*arguments[0], *arguments[1].values()]
        samples = find_batch(values, self.batch_sizes) or find_batch(values, self.batch_sizes, MAX_DEPTH)
        if not samples or any(tensor.requires_grad or has_no_values(tensor) for tensor in samples):
            return
        batch, mask = samples[0], arguments[1].get("attention_mask")
        if (
            isinstance(mask, Tensor)
            and (mask.shape, mask.device) == (batch.shape, batch.device)
            and not (mask.is_floating_point() or has_no_values(mask))
        ):
            # A sample's padding depends on the others of its batch: it moves to the end, as zeros.
            samples = [(batch * mask).gather(-1, (mask == 0).sort(dim=-1, stable=True).indices)]
        rows = chain.from_iterable(map(fingerprints, samples))  # computed only if they are noted
        # A wrapper's own training flag may be out of date.
        if not torch.is_grad_enabled() or not any(part.training for part in module.modules()):
            if self.model is not None and self.iteration == self.trained:
                return  # a teacher's pass, or another one for the step under way
            self.evaluation_model = self.evaluation_model or module
            if module is self.evaluation_model:
                self.evaluated.setdefault(self.iteration, []).extend(rows)
                self.collectives, self.is_trimmed = 0, False
            return
        if self.model is None:
            self.drop_teacher(module)
        self.end_evaluation()
        if self.model is None:
            self.model, self.trained = id(module), self.iteration
            self.draw_otherwise()
            self.record["random"] = self.record["random"] or step_checksums()
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    self.autocast = torch.get_autocast_dtype(device)
        if id(module) == self.model:
            self.record["rows"] += rows

    def draw_otherwise(self) -> None:
        """With SAME_OTHER_DRAWS, draw a number from each global generator, so that the script draws others."""
        if self.is_redrawn:
            devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
            _ = [torch.rand((), device=device) for device in devices], random.random(), np.random.rand()

    def drop_teacher(self, module: nn.Module) -> None:
        """Drop the passes of another model, a teacher, on the batch that a model is about to be trained on."""
        other = self.evaluation_model
        if other is None or self.iteration < 0 or {*other.parameters()} & {*module.parameters()}:
            return
        counts, self.collectives = self.before_batch
        self.evaluated = {key: self.evaluated[key][:count] for key, count in counts.items()}
        self.evaluation_model = other if self.evaluated else None

    def end_evaluation(self) -> None:
        """Write the evaluations that have just ended, with the number of collectives after the last one."""
        collectives = self.collectives + ("horovod.torch" in sys.modules)
        for rows in self.evaluated.values():
            self.write(
                "evaluation",
                rows=rows,
                collectives=collectives,
                targets=sorted({*self.targets}),
                is_trimmed=self.is_trimmed,
            )
        self.start_evaluation()

    def wrap(self, original: Function, *args: Any, **kwargs: Any) -> None:
        """Record that a model is wrapped in DistributedDataParallel."""
        self.write("wrapped")
        original(*args, **kwargs)

    def count_collective(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Count a collective and run it; note a gather of samples' outputs, whose result carries no gradient."""
        self.collectives += 1
        self.is_trimmed = self.is_trimmed or is_called_by("gather_for_metrics")
        given = [*args, *kwargs.values()] if original.__name__ in GATHERS and torch.is_grad_enabled() else []
        if any(isinstance(value, Tensor) and value.requires_grad and value.numel() > 1 for value in given):
            self.record["gathered"] = True
        return original(*args, **kwargs)

    def count_barrier(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Run a barrier; count it as a collective where MMEngine's ranks exchange results by files."""
        self.collectives += is_called_by("collect_results_cpu")
        return original(*args, **kwargs)

    def average(self, original: Function, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute a loss; note over how many targets, or what sum of class weights, it is a mean in training.

        If it is no mean, note the targets, too: the script may divide by their number.
        """
        loss = cast(Tensor, original(input, target, *args, **kwargs))
        # Targets in floating point are chances of each class, which all count.
        is_noted = loss.requires_grad or self.evaluation_model is not None
        if not is_noted or target.is_floating_point() or torch.compiler.is_compiling() or has_no_values(target):
            return loss
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction")
        given = dict(zip(names, args, strict=False)) | kwargs
        reduction, legacy = given.get("reduction", "mean"), (given.get("size_average"), given.get("reduce"))
        if legacy != (None, None):  # deprecated, and they come before reduction
            reduction = legacy_get_string(*legacy, emit_warning=False)
        classes, weight = target[target != given.get("ignore_index", -100)], given.get("weight")
        weights = None if weight is None or reduction != "mean" else weight[classes]
        if not loss.requires_grad:
            self.targets.append(len(classes))
            return loss
        self.record["averaged"].append(len(classes) if weights is None else weights.sum().item())
        size = target.numel()
        if reduction == "mean" and input.shape == (size, size) and target.tolist() == [*range(size)]:
            self.record["contrasted"] = size  # each sample's class is itself, as in CLIP
        return loss

    def drop_nothing(
        self, original: Function, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Return the input without dropout."""
        self.uses_dropout = self.uses_dropout or (training and p > 0)
        return input

    def attend(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Compute attention without dropout."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        self.uses_dropout = self.uses_dropout or given.get("dropout_p", 0.0) > 0
        return original(**given | {"dropout_p": 0.0})

    # Data

    def draw_batches(self, original: Function, loader: DataLoader[Any]) -> Any:
        """Return a loader's batch sampler, wrapped to record its batches if the data set is map-style."""
        sampler = original(loader)
        if loader._dataset_kind != dataloader._DatasetKind.Map or not loader._auto_collation:
            return sampler
        return Batches(sampler, self, len(loader.dataset))  # type: ignore[arg-type]

    def next_batch(self, original: Function, iterator: Any) -> Any:
        """Return a loader's next batch; note its iteration, and the state of the random generators after it."""
        self.before_batch = {key: len(rows) for key, rows in self.evaluated.items()}, self.collectives
        batch = original(iterator)
        sampler, size = iterator._index_sampler, 0
        if isinstance(sampler, Batches):  # workers may have drawn it before those of another loader
            self.iteration, size = sampler.iteration, sampler.sizes.popleft()
        self.batch_sizes.append(size)
        self.draw_otherwise()  # a diffusion model's noise is drawn before the model is called
        self.record["random"] = step_checksums()
        return batch

    def fork_workers(self, original: Function, iterator: Any, loader: DataLoader[Any]) -> None:
        """Fork a loader's workers, as before Python 3.14, unless the script chooses: others lack these hooks."""
        if loader.multiprocessing_context is None and multiprocessing.get_start_method(allow_none=True) is None:
            loader.multiprocessing_context = "fork"
        original(iterator, loader)

    def seed_samples(
        self, original: Function, fetcher: Any, dataset: Any, auto_collation: bool, collate: Function, *args: Any
    ) -> None:
        """Make the fetcher of a map-style data set seed the random generators by each sample's index."""
        own = functools.partial(self.collate, collate)
        original(fetcher, SeededSamples(dataset, self), auto_collation, own, *args)

    def collate(self, original: Function, samples: Any) -> Any:
        """Make a batch of samples; note the generators from which the loader's collate_fn draws, as a step may."""
        self.draw_otherwise()
        before = checksums() if self.unchecked_batches else {}
        batch = original(samples)
        if before:
            self.unchecked_batches -= 1
            if drawn := [name for name, state in checksums().items() if state != before[name]]:
                self.unchecked_batches = 0
                self.write("collated", moved=drawn)
        return batch


class Batches:
    """A loader's batch sampler that records the batches it draws, or that replays given ones."""

    def __init__(self, sampler: Any, observer: Observer, size: int) -> None:
        self.sampler, self.observer, self.size = sampler, observer, size
        self.iteration = -1
        self.sizes = deque[int]()  # of the batches that have been drawn, and not returned yet

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        observer = self.observer
        iteration = observer.iterations
        observer.iterations += 1
        self.sizes.clear()
        part = self.sampler
        while part is not None:  # such as a BatchSampler of a DistributedSampler
            if hasattr(part, "set_epoch") and hasattr(part, "epoch") and getattr(part, "shuffle", True):
                observer.write("shuffled", sampler=id(part), epoch=part.epoch, iteration=iteration)
            part = getattr(part, "batch_sampler", getattr(part, "sampler", None))
        for batch in observer.replay.get(str(iteration), self.sampler):
            try:
                indices = [int(index) for index in batch]
            except (TypeError, ValueError):  # single samples, or indices of another kind
                self.sizes.append(0)
                yield batch
                continue
            self.iteration = iteration
            self.sizes.append(len(indices))
            observer.write("batch", iteration=iteration, indices=indices, size=self.size)
            yield indices[::-1] if observer.is_control else batch


class SeededSamples:
    """A map-style data set that seeds the global generators by a sample's index before it returns the sample."""

    def __init__(self, dataset: Any, observer: Observer) -> None:
        self.dataset, self.observer = dataset, observer

    def __getitem__(self, index: Any) -> Any:
        """Return a sample and restore the generators; record the first sample that draws from them."""
        states = random_states()
        seed = zlib.crc32(repr(index).encode())
        seed_generators(seed)
        seeded = checksums() if self.observer.unchecked else {}
        try:
            return self.dataset[index]
        finally:
            after = checksums() if seeded else {}
            self.observer.unchecked -= bool(seeded)
            if drawn := [name for name in after if after[name] != seeded[name]]:
                self.observer.unchecked = 0
                own, worker = checksums(states), getattr(get_worker_info(), "id", 0)
                self.observer.write("augmentation", worker=worker, states={name: own[name] for name in drawn})
            restore_random_states(states)


def patch(owner: Any, name: str, replacement: Function) -> None:
    """Replace the function owner.name by replacement(original, ...)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, replaced)


def install(observer: Observer) -> None:
    """Install the hooks for the rest of this process."""
    register_optimizer_step_pre_hook(observer.before_step)
    register_optimizer_step_post_hook(observer.after_step)
    patch(nn.Module, "__call__", observer.call)
    patch(DistributedDataParallel, "__init__", observer.wrap)
    for owner in (dist, dist.distributed_c10d):
        for name in COLLECTIVES:
            if hasattr(owner, name):
                patch(owner, name, observer.count_collective)
        patch(owner, "barrier", observer.count_barrier)
    for name in ("cross_entropy", "nll_loss"):
        patch(functional, name, observer.average)
    for name in DROPOUTS:
        patch(functional, name, observer.drop_nothing)
    patch(functional, "scaled_dot_product_attention", observer.attend)
    batch_sampler = DataLoader._index_sampler.fget  # type: ignore[attr-defined]
    DataLoader._index_sampler = property(functools.partial(observer.draw_batches, batch_sampler))  # type: ignore
    patch(dataloader._BaseDataLoaderIter, "__next__", observer.next_batch)
    patch(dataloader._MultiProcessingDataLoaderIter, "__init__", observer.fork_workers)
    patch(_utils.fetch._MapDatasetFetcher, "__init__", observer.seed_samples)


def find_modules_as(folder: str) -> None:
    """Let imports begin in a folder, as under python; this repository, whose packages it may hide, comes last."""
    root = str(Path(__file__).resolve().parents[2])
    sys.path[:] = [folder, *(path for path in sys.path if path not in ("", root)), root]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("scripts", "recipes", "tests")]:
        del sys.modules[name]


def run_script(script: str, argv: list[str]) -> None:
    """Run a file, or a module by its dotted name, as `python` does, and record it."""
    names = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    rank = next((os.environ[name] for name in names if os.environ.get(name)), "0")
    folder = Path(os.environ["SAME_FOLDER"])
    for number, name in ((1, "out"), (2, "err")):  # a launcher would mix the lines of all ranks
        file = os.open(folder / f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a script may end by os._exit()
    os.environ["SAME_REPORT"] = str(folder / f"rank{rank}.report")
    # A script that does not seed them then does the same in each run. Ranks differ, as they do without a seed:
    # those that are forked from one process would have the same state.
    seed_generators(int(rank))
    torch.manual_seed(int(rank))  # on GPUs, too
    observer = Observer(folder, int(rank))
    install(observer)
    sys.argv = [script, *argv]
    is_file = script.endswith(".py") or os.sep in script
    find_modules_as(str(Path(script).resolve().parent) if is_file else os.getcwd())
    try:
        if is_file:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    finally:
        with contextlib.suppress(OSError):
            observer.end_evaluation()
        sys.stdout.flush()


if __name__ == "__main__":
    run_script(sys.argv[1], sys.argv[2:])
