"""Run a training script as one rank, with hooks on torch that record what it does in each step.

    SAME_FOLDER=/tmp/trace torchrun --nproc-per-node=2 -m scripts.same.observe train.py --batch-size 24

`make same` starts it in each process. The script needs no change. A line of rank0.jsonl is an event: an optimizer
step with the samples that went into it, gradients before and after the exchange and weights, or an evaluation.
Tensors are recorded as sketches: sums over 61 interleaved parts, which are linear: the sketch of an average over
ranks is the average of their sketches.

Randomness that may differ between world sizes is removed: dropout is off, and the global random generators are
seeded by the sample's index while a data set returns it.

Variables: SAME_FOLDER, where to write; SAME_CONTROL=1 reverses each training batch (without a DataLoader: rounds
gradients differently) to measure rounding; SAME_REPLAY, a JSON file with the batches to draw, by loader iteration;
SAME_STOP_AFTER=N ends the process after N optimizer steps.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import runpy
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler, _utils, dataloader, get_worker_info

SKETCH_SIZE = 61
MAX_FEATURES = 4096
"""Elements of a sample that its fingerprint reads, evenly spread."""

RANDOM_SAMPLES = 64
"""Samples of which a process checks whether their data set draws random numbers, until one does."""

COLLECTIVES = (
    *("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather", "all_gather_object"),
    *("gather_object", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_reduce_coalesced", "batch_isend_irecv"),
)
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def sketch(tensor: Tensor) -> Tensor:
    """Return the sums over every 61st element of a tensor of any shape, (61,) float64 on the CPU."""
    flat = tensor.detach()
    if flat.layout != torch.strided:
        flat = flat.to_dense()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.flatten()
    padded = torch.zeros(-(-flat.numel() // SKETCH_SIZE) * SKETCH_SIZE, dtype=torch.float64, device=flat.device)
    padded[: flat.numel()] = flat
    return padded.view(-1, SKETCH_SIZE).sum(dim=0).cpu()


def sketch_all(tensors: Iterable[Tensor | None]) -> Tensor:
    """Return the sum of the sketches of tensors, each shifted by its place; None counts as zero."""
    total = torch.zeros(SKETCH_SIZE, dtype=torch.float64)
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            total += sketch(tensor).roll(7 * i)
    return total


def fingerprints(batch: Tensor) -> list[str]:
    """Return a fingerprint of the content of each sample along the first dimension."""
    rows = batch.detach().flatten(1) if batch.dim() > 1 else batch.detach().unsqueeze(1)
    rows = rows[:, :: max(1, rows.shape[1] // MAX_FEATURES)].double()
    places = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device)
    return [f"{value:.9e}" for value in (rows * torch.cos(places + 1)).sum(dim=1).tolist()]


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor with a batch dimension in nested arguments."""
    if isinstance(value, Tensor):
        return value if value.dim() else None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for item in items if (found := first_tensor(item)) is not None), None)


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators on the CPU."""
    states: dict[str, Any] = {"torch": torch.default_generator.get_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the generators to the states that random_states() returned."""
    torch.default_generator.set_state(states["torch"])
    random.setstate(states["random"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


def random_hashes() -> dict[str, int]:
    """Return a checksum of each generator's state."""
    hashes = {}
    for name, state in random_states().items():
        hashes[name] = zlib.crc32(state.numpy().tobytes() if name == "torch" else repr(state).encode())
        if name == "numpy":  # its repr leaves numbers out
            hashes[name] = zlib.crc32(state[1].tobytes() + str(state[2]).encode())
    return hashes


def numel(value: Any) -> int:
    """Return how many elements the tensors in a collective's first argument have."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, list | tuple):
        return sum(map(numel, value))
    return numel(getattr(value, "tensor", None)) if value is not None else 0  # a P2POp


class Observer:
    """What this process has done since the last optimizer step, and the file where steps are recorded."""

    def __init__(self, folder: Path, rank: int) -> None:
        # Workers of a DataLoader inherit the descriptor: lines appended to it stay whole.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.file = os.open(folder / f"rank{rank}.jsonl", flags, 0o600)
        self.is_control = bool(os.environ.get("SAME_CONTROL"))
        replay = os.environ.get("SAME_REPLAY")
        self.replay: dict[str, list[list[int]]] = json.loads(Path(replay).read_text()) if replay else {}
        self.stop_after = int(os.environ.get("SAME_STOP_AFTER", "0"))
        self.optimizers: list[Optimizer] = []
        self.places: dict[int, int] = {}  # of each parameter that an optimizer has, by id
        self.steps = self.step_depth = self.call_depth = self.iterations = 0
        self.iteration = -1
        self.trained_iterations: set[int] = set()
        self.checked_samples = 0
        self.uses_loader = self.uses_batch_norm = self.uses_dropout = False
        self.evaluated: list[str] = []
        self.evaluation_model: int | None = None
        self.collectives_in_evaluation = 0
        self.late_numel = 0
        self.start_step()

    def start_step(self) -> None:
        """Forget what went into the last step."""
        self.local: dict[int, Tensor] = {}
        self.rows: list[str] = []
        self.sizes: list[int] = []
        self.model: int | None = None
        self.unsynced_forwards = self.numel = 0
        self.random: dict[str, int] | None = None
        self.pending: dict[str, Any] = {}

    def write(self, event: str, **fields: Any) -> None:
        """Append an event."""
        os.write(self.file, (json.dumps({"event": event, **fields}) + "\n").encode())

    # Optimizers

    def add_parameters(self, group: dict[str, Any]) -> None:
        """Watch the gradients that parameters receive in this process, before any exchange."""
        for parameter in group["params"]:
            if id(parameter) not in self.places and parameter.requires_grad and parameter.is_leaf:
                self.places[id(parameter)] = len(self.places)
                parameter.register_hook(functools.partial(self.receive, id(parameter)))

    def receive(self, key: int, gradient: Tensor) -> None:
        """Add a gradient that backward() has computed to those of the step."""
        place = self.places[key]
        self.local[key] = self.local.get(key, 0) + sketch(gradient).roll(7 * place)
        if self.iteration >= 0 and self.iteration not in self.trained_iterations:
            self.trained_iterations.add(self.iteration)
            self.write("trained", iteration=self.iteration)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Record gradients and weights; where step() is given a closure, once the closure has computed them."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self.step_depth == 0:
            self.outer = optimizer
        self.step_depth += 1
        if closure is None:
            self.capture()
            return None

        def observed() -> Any:
            result = closure()
            self.capture()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the optimizer that steps, the outer one where one wraps another."""
        found = [parameter for group in self.outer.param_groups for parameter in group["params"]]
        return [getattr(parameter, "_local_tensor", parameter) for parameter in found]  # a DTensor's own shard

    def capture(self) -> None:
        """Keep what the step is made of; an inner optimizer sees later, exchanged gradients, and wins."""
        parameters = self.parameters()
        gradients = [parameter.grad for parameter in parameters]
        if self.is_control and not self.uses_loader:
            self.round_differently(gradients)
        local = [self.local[key] for key in self.local]
        shapes = [list(parameter.shape) for parameter in parameters]
        hashes = random_hashes()
        self.pending = {
            "lr": [float(group["lr"]) for group in self.outer.param_groups if "lr" in group],
            "weights": sketch_all(parameters).tolist(),
            "local": sum(local, torch.zeros(SKETCH_SIZE)).tolist() if local else None,
            "final": sketch_all(gradients).tolist(),
            "missing": [i for i, gradient in enumerate(gradients) if gradient is None],
            "shapes": zlib.crc32(json.dumps(shapes).encode()),
            "numel": sum(parameter.numel() for parameter in parameters),
            "low_precision": self.low_precision(),
            "moved": [name for name in hashes if self.random and hashes[name] != self.random.get(name)],
        }

    def low_precision(self) -> str:
        """Return the lowest precision in use: autocast's, TF32, or that of the parameters."""
        device = self.parameters()[0].device.type
        if device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
            return "tf32"
        return str(self.autocast or self.parameters()[0].dtype).removeprefix("torch.")

    autocast: torch.dtype | None = None

    def round_differently(self, gradients: list[Tensor | None]) -> None:
        """Change gradients by about one rounding of their tensor's scale."""
        generator = torch.Generator().manual_seed(self.steps)
        for gradient in gradients:
            if gradient is not None:
                noise = torch.randn(gradient.shape, generator=generator).to(gradient)
                scale = gradient.detach().abs() + gradient.detach().norm() / max(1, gradient.numel()) ** 0.5
                gradient.detach().add_(noise * scale * torch.finfo(gradient.dtype).eps)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Write the step once the outer optimizer has finished it."""
        self.step_depth -= 1
        if self.step_depth:
            return
        if self.outer not in self.optimizers:
            self.optimizers.append(self.outer)
        self.steps += 1
        self.write(
            "step",
            optimizer=self.optimizers.index(self.outer),
            **self.pending,
            after=sketch_all(self.parameters()).tolist(),
            rows=self.rows,
            sizes=self.sizes,
            unsynced_forwards=self.unsynced_forwards,
            exchanged=self.numel,
            late=self.late_numel,
            random=self.random,
            batch_norm=self.uses_batch_norm,
            dropout=self.uses_dropout,
            iteration=self.iteration,
        )
        self.start_step()
        if self.steps == self.stop_after:
            sys.stdout.flush()
            os._exit(0)

    # Models

    def call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module; note the samples that an outermost one with parameters is given."""
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        if isinstance(module, nn.RNNBase) and module.dropout:
            self.uses_dropout, module.dropout = True, 0.0
        if isinstance(module, _BatchNorm) and module.training and not isinstance(module, nn.SyncBatchNorm):
            self.uses_batch_norm = True
        if self.call_depth == 0 and next(module.parameters(), None) is not None:
            self.see_batch(module, (args, kwargs))
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
            self.unsynced_forwards += not module.require_backward_grad_sync
        self.call_depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self.call_depth -= 1

    def see_batch(self, module: nn.Module, arguments: Any) -> None:
        """Note the samples of a batch, as training's or evaluation's, of the first module that each calls."""
        batch = first_tensor(arguments)
        if batch is None or batch.requires_grad:
            return
        # A wrapper's own flag may be out of date.
        if not torch.is_grad_enabled() or not any(part.training for part in module.modules()):
            self.evaluation_model = self.evaluation_model or id(module)
            if id(module) == self.evaluation_model:
                self.evaluated += fingerprints(batch)
                self.collectives_in_evaluation = 0
            return
        self.end_evaluation()
        if self.model is None:
            self.model = id(module)
            self.late_numel, self.numel = self.numel, 0
            self.random = self.random or random_hashes()
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    self.autocast = torch.get_autocast_dtype(device)
        if id(module) == self.model:
            self.rows += fingerprints(batch)
            self.sizes.append(len(batch))

    def end_evaluation(self) -> None:
        """Write the evaluation that has just ended, if there was one."""
        if self.evaluated:
            self.write(
                "evaluation",
                rows=self.evaluated,
                collectives=self.collectives_in_evaluation + ("horovod.torch" in sys.modules),
            )
        self.evaluated, self.evaluation_model, self.collectives_in_evaluation = [], None, 0

    def count_collective(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a collective, and note how much is sent."""
        given = args[0] if args else next(iter(kwargs.values()), None)
        self.numel += numel(given)
        self.collectives_in_evaluation += 1
        return original(*args, **kwargs)

    def drop_nothing(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Return the input, in place of dropout."""
        self.uses_dropout = self.uses_dropout or (training and p > 0)
        return input

    # Data

    def note_sampler(self, original: Callable[..., Any], sampler: DistributedSampler[Any]) -> Any:
        """Record an epoch of a DistributedSampler."""
        self.write("sampler", sampler=id(sampler), epoch=sampler.epoch, shuffle=sampler.shuffle)
        return original(sampler)

    def next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Return a loader's next batch; note the state of the random generators after it."""
        self.uses_loader = True
        batch = original(iterator)
        self.random = random_hashes()
        return batch

    def fetch(self, fetcher: Any, index: Any) -> Any:
        """Return a batch of a map-style data set, each sample with the random numbers of its index."""
        dataset = fetcher.dataset
        if not fetcher.auto_collation:
            return fetcher.collate_fn(self.sample(lambda: dataset[index], index))
        get_items = getattr(dataset, "__getitems__", None)
        if get_items:
            return fetcher.collate_fn([self.sample(functools.partial(get_items, [i]), i)[0] for i in index])
        return fetcher.collate_fn([self.sample(functools.partial(dataset.__getitem__, i), i) for i in index])

    def sample(self, get: Callable[[], Any], index: Any) -> Any:
        """Return a sample with the global generators seeded by its index, and their states as before."""
        states = random_states()
        own = random_hashes() if self.checked_samples < RANDOM_SAMPLES else {}
        seed = zlib.crc32(repr(index).encode())
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if "numpy" in states:
            sys.modules["numpy"].random.seed(seed)
        before = random_hashes() if own else {}
        try:
            return get()
        finally:
            if before:
                after = random_hashes()
                worker = getattr(get_worker_info(), "id", 0)
                self.checked_samples += 1
                if kinds := [name for name in before if before[name] != after[name]]:
                    self.write("augmentation", worker=worker, states={name: own[name] for name in kinds})
                    self.checked_samples = RANDOM_SAMPLES
            restore_random_states(states)


class Batches:
    """A loader's batch sampler that records the batches it draws, or draws given ones."""

    def __init__(self, sampler: Any, observer: Observer, size: int) -> None:
        self.sampler, self.observer, self.size = sampler, observer, size

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        observer = self.observer
        observer.iterations += 1
        iteration = observer.iterations - 1
        given = observer.replay.get(str(iteration))
        for batch in given if given is not None else self.sampler:
            observer.iteration = iteration
            try:
                indices = [int(index) for index in batch]
            except (TypeError, ValueError):  # single samples, or indices of another kind
                yield batch
                continue
            observer.write("batch", iteration=iteration, indices=indices, size=self.size)
            yield indices[::-1] if observer.is_control else batch


def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function by replacement(original, ...)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, replaced)


def install(observer: Observer) -> None:
    """Put the hooks in place, for the rest of this process."""
    register_optimizer_step_pre_hook(observer.before_step)
    register_optimizer_step_post_hook(observer.after_step)

    def add_group(original: Callable[..., Any], optimizer: Optimizer, group: dict[str, Any]) -> None:
        original(optimizer, group)
        observer.add_parameters(optimizer.param_groups[-1])

    patch(Optimizer, "add_param_group", add_group)
    patch(nn.Module, "__call__", observer.call)

    def wrap(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        observer.write("wrapped")
        original(*args, **kwargs)

    patch(DistributedDataParallel, "__init__", wrap)
    for owner in (dist, dist.distributed_c10d):
        for name in COLLECTIVES:
            if hasattr(owner, name):
                patch(owner, name, observer.count_collective)
    for name in DROPOUTS:
        setattr(functional, name, observer.drop_nothing)

    def attend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        dropped = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        observer.uses_dropout = observer.uses_dropout or dropped > 0
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return original(*args, **(kwargs | {"dropout_p": 0.0} if "dropout_p" in kwargs else kwargs))

    patch(functional, "scaled_dot_product_attention", attend)
    patch(DistributedSampler, "__iter__", observer.note_sampler)
    patch(dataloader._BaseDataLoaderIter, "__next__", observer.next_batch)
    patch(_utils.fetch._MapDatasetFetcher, "fetch", lambda _, fetcher, index: observer.fetch(fetcher, index))
    batch_sampler = DataLoader._index_sampler.fget  # type: ignore[attr-defined]

    def recorded(loader: DataLoader[Any]) -> Any:
        sampler = batch_sampler(loader)
        if loader._dataset_kind != dataloader._DatasetKind.Map or not loader._auto_collation:
            return sampler
        return Batches(sampler, observer, len(loader.dataset))  # type: ignore[arg-type]

    DataLoader._index_sampler = property(recorded)  # type: ignore[assignment]


def run_script(script: str, argv: list[str]) -> None:
    """Run a file, or a module by its dotted name, as python does, and record it."""
    rank = (
        os.environ.get("RANK") or os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    )
    observer = Observer(Path(os.environ["SAME_FOLDER"]), int(rank))
    install(observer)
    sys.argv = [script, *argv]
    try:
        if script.endswith(".py"):
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    finally:
        with contextlib.suppress(OSError):
            observer.end_evaluation()
            observer.write("end", late=observer.numel)
        sys.stdout.flush()


if __name__ == "__main__":
    run_script(sys.argv[1], sys.argv[2:])
