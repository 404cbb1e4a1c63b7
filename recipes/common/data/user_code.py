"""Models, data and tasks of your own, named on the command line as package.module:function.

The module is imported from the working directory or from wherever Python finds it. docs/your-model.md shows one.
"""

from __future__ import annotations

import importlib
import math
import os
import random
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from recipes.common.data.splits import Batch, Data, Spec, Split
from recipes.common.data.workers import LoadedSplit, start_server
from recipes.common.errors import UserError, nearest
from recipes.common.options import Options, is_reference
from recipes.common.seeding import mix
from recipes.common.task import Classification, LanguageModel, Task

KINDS = ("class", "tokens", "bytes", "values")
"""What a target may be; --task names what to do with `values`."""

FINGERPRINT_SAMPLES = 8
"""So many samples of an indexable go into its digest."""


def digests(args: Options) -> dict[str, str]:
    """Return a digest of each module that the options name: all ranks have to run the same code."""
    found = {}
    for flag, text in (("--data", args.data), ("--model", args.model), ("--task", args.task)):
        if is_reference(text):
            load(flag, text)
            module = text.split(":")[0]
            path = sys.modules[module].__file__
            found[module] = f"code with digest {zlib.crc32(Path(path).read_bytes()):08x}" if path else "no file"
    return found


def load(flag: str, text: str) -> Callable[..., Any]:
    """Import what an option names.

    Raises:
        UserError: the module cannot be imported, or has nothing callable of that name.
    """
    module_name, name = text.split(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            fix = f"put {error.name.replace('.', '/')}.py into {os.getcwd()}, or its folder into PYTHONPATH"
            raise UserError(f"{flag} {text}: there is no module {error.name!r}; {fix}") from None
        raise _refusal(f"{flag} {text}: importing {module_name} failed", error) from error
    except Exception as error:
        raise _refusal(f"{flag} {text}: importing {module_name} failed", error) from error
    found = getattr(module, name, None)
    if not callable(found):
        what = "is not a function or class" if hasattr(module, name) else "does not exist"
        raise UserError(f"{flag} {text}: {name} {what} in {module.__file__}{nearest(name, vars(module))}")
    return found


def call(what: str, function: Callable[..., Any], *values: Any) -> Any:
    """Return what a function of the user's returns.

    Raises:
        UserError: it has raised something, with the line.
    """
    try:
        return function(*values)
    except UserError:
        raise
    except Exception as error:
        raise _refusal(f"{what} failed", error) from error


def _refusal(what: str, error: Exception, fix: str = "fix it and start again") -> UserError:
    """Return an error of the user's code as one line, with the innermost place outside of installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not {"site-packages", "importlib"} & set(Path(frame.filename).parts)]
    place = own[-1] if own else None
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}, line {error.lineno}"
    else:
        where = f"{place.filename}, line {place.lineno}" if place else "unknown line"
    reason = " ".join(str(error).split())[:300]
    return UserError(f"{what}: {type(error).__name__}: {reason} ({where}); {fix}")


class OwnTensors(Split):
    """Samples that live on the device as they are.

    Args:
        inputs, targets: tensors whose first dimension counts samples.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def fingerprint(self) -> str:
        """Return what tells this split from another: its size and a digest of all of it."""
        return f"{len(self)} samples with digest {_digest((self.inputs, self.targets)):08x}"

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor."""
        for index in indices:
            index = index.to(self.targets.device)
            yield self.inputs.index_select(0, index), self.targets.index_select(0, index)


class SeededSamples(Dataset[Any]):
    """The samples of an indexable by (epoch, index), which seed what it draws at random.

    So a sample is augmented alike whichever rank or worker process asks for it, and after a resume. One that
    raises an error comes back as the stand-in, with that error as a line: its rank has to stop with the others.

    Args:
        samples: the indexable.
        stand_in: a sample of it.
        what: its name, for people.
        seed: --seed.
        is_train: whether samples differ between epochs.
    """

    def __init__(self, samples: Any, stand_in: Any, what: str, seed: int, is_train: bool) -> None:
        self.samples, self.stand_in, self.what = samples, stand_in, what
        self.seed, self.is_train = seed, is_train

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Any, str]:
        """Return a sample, and why it could not be read: empty if it could."""
        epoch, index = key
        value = mix(self.seed, epoch if self.is_train else 0, index)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(value)
            np.random.seed(value % 2**32)
            random.seed(value)
            try:
                return self.samples[index], ""
            except Exception as error:
                fix = "fix it, then add --resume auto"
                return self.stand_in, str(_refusal(f"{self.what}[{index}] failed", error, fix))

    def read(self, index: int) -> Any:
        """Return a sample of the first epoch; raises UserError where it cannot be read."""
        sample, fault = self[0, index]
        if fault:
            raise UserError(fault)
        return sample


class OwnSamples(LoadedSplit):
    """An indexable of (input, target), read by --workers processes; `on_fault` is told of what does not load."""

    def __init__(
        self, dataset: SeededSamples, args: Options, device: torch.device, on_fault: Callable[[UserError], None]
    ) -> None:
        super().__init__(dataset, args.workers, device, start_server() if args.workers else None)
        self.on_fault = on_fault

    def fingerprint(self) -> str:
        """Return what tells this split from another: its size and a digest of a few samples.

        Raises:
            UserError: one of them cannot be read.
        """
        some = range(0, len(self), -(-len(self) // FINGERPRINT_SAMPLES))
        values = [torch.as_tensor(value) for index in some for value in self.dataset.read(index)]
        return f"{len(self)} samples with digest {_digest(values):08x}"

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each index tensor that is not empty (the share of a rank too many is)."""
        for (inputs, targets), faults in self.load(indices, epoch):
            for fault in filter(None, faults):
                self.on_fault(UserError(fault))
            yield inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


def _digest(tensors: Iterable[Tensor]) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data, checksum)
    return checksum


def load_own_data(args: Options, device: torch.device, on_fault: Callable[[UserError], None]) -> Data:
    """Return the data set of a function of the user's; `on_fault` is told of a sample that later does not load.

    It takes no arguments and returns a dict: "train" and "test", each a pair of tensors (inputs, targets) or an
    indexable of such pairs for one sample; "target", one of KINDS; and "num_classes", the number of classes or of
    different tokens, unless targets are values.

    Raises:
        UserError: it returns something else.
    """
    what = f"--data {args.data}"
    found = call(what, load("--data", args.data))
    fix = f'return {{"train": ..., "test": ..., "target": one of {", ".join(KINDS)}, "num_classes": N}}'
    if not isinstance(found, dict):
        raise UserError(f"{what} returned {_name(found)}, not a dict; {fix}")
    for key in ("train", "test", "target"):
        if key not in found:
            raise UserError(f"{what} returned a dict without {key!r}; {fix}")
    kind, num_classes = found["target"], found.get("num_classes")
    if kind not in KINDS:
        raise UserError(f"{what}: unknown target {kind!r}{nearest(str(kind), KINDS)}; {fix}")
    if kind != "values" and (not isinstance(num_classes, int) or num_classes < 1):
        raise UserError(
            f'{what}: "num_classes" is {num_classes!r}; give the number of classes or different tokens'
        )
    train = _split(f"{what}: 'train'", found["train"], args, device, on_fault, is_train=True)
    test = _split(f"{what}: 'test'", found["test"], args, device, on_fault, is_train=False)
    (inputs, targets), other = _specs(train), _specs(test)
    if (inputs, targets) != other:
        ours, theirs = f"{inputs} and {targets}", f"{other[0]} and {other[1]}"
        raise UserError(f"{what}: a sample of 'train' is {ours}, one of 'test' {theirs}; make them alike")
    if kind != "values" and targets.dtype != torch.int64:
        raise UserError(f"{what}: targets are {targets.dtype}; class and token numbers have to be torch.int64")
    if kind == "class" and targets.shape:
        raise UserError(f"{what}: targets have the shape {targets.shape}; give one class number for each sample")
    return Data(train, test, inputs, targets, num_classes, kind)


def _split(
    what: str,
    samples: Any,
    args: Options,
    device: torch.device,
    on_fault: Callable[[UserError], None],
    is_train: bool,
) -> OwnTensors | OwnSamples:
    if isinstance(samples, Sequence) and len(samples) == 2 and all(isinstance(part, Tensor) for part in samples):
        inputs, targets = samples
        if len(inputs) != len(targets) or not len(targets):
            raise UserError(f"{what} has {len(inputs)} inputs and {len(targets)} targets; give as many of each")
        return OwnTensors(inputs.to(device), targets.to(device))
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        fix = "give a pair of tensors, or an object with len() and [i], such as a torch.utils.data.Dataset"
        raise UserError(f"{what} is {_name(samples)}; {fix}")
    if not len(samples):
        raise UserError(f"{what} is empty; give at least one sample")
    sample = call(f"{what}[0]", samples.__getitem__, 0)
    if not isinstance(sample, Sequence) or len(sample) != 2:
        raise UserError(f"{what}[0] is {_name(sample)}; each sample has to be a pair (input, target)")
    for value in sample:
        call(f"{what}[0]", torch.as_tensor, value)
    dataset = SeededSamples(samples, sample, what, args.seed, is_train)
    return OwnSamples(dataset, args, device, on_fault)


def _specs(split: OwnTensors | OwnSamples) -> tuple[Spec, Spec]:
    pair = (split.inputs[0], split.targets[0]) if isinstance(split, OwnTensors) else split.dataset.read(0)
    first, second = (torch.as_tensor(value) for value in pair)
    return Spec(tuple(first.shape), first.dtype), Spec(tuple(second.shape), second.dtype)


def _name(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def build_own_model(args: Options, data: Data) -> nn.Module:
    """Return what a function of the user's makes of the data's shapes: see Data.

    Raises:
        UserError: it is no model.
    """
    model = call(f"--model {args.model}", load("--model", args.model), data)
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {args.model} returned {_name(model)}; return a torch.nn.Module")
    return model


def check_fit(model: nn.Module, args: Options, data: Data) -> None:
    """Run two samples through model and task before anything is trained with code that does not fit.

    A model on the meta device, which computes shapes alone, gets outputs of one half.

    Raises:
        UserError: the model does not take the inputs, the task not its outputs, or it does not return sums.
    """
    inputs, targets = _two_samples(data)
    count, task = len(inputs), data.task
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    own = inputs.to("meta") if is_meta else inputs
    output = call(f"--model {args.model} on {count} samples, {data.input}", model.eval(), own)
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != count:
        what = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else _name(output)
        fix = "return a tensor with a row for each"
        raise UserError(f"--model {args.model} returned {what} for {count} samples; {fix}")
    output = torch.full(output.shape, 0.5, requires_grad=True) if is_meta else output.float()
    what = f"--task {type(task).__name__} on outputs {tuple(output.shape)} and targets {tuple(targets.shape)}"
    loss = call(what, task.loss_sum, output, targets)
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        raise UserError(f"{what}: loss_sum() has to return a scalar tensor that gradients come from")
    sums = call(what, task.metric_sums, output, targets)
    if len(sums) != len(task.metrics):
        raise UserError(f"{what}: metric_sums() returned {len(sums)} values for metrics {tuple(task.metrics)}")
    alone = sum(call(what, task.loss_sum, output[i : i + 1], targets[i : i + 1]).item() for i in range(count))
    if not math.isclose(loss.item(), alone, rel_tol=1e-3, abs_tol=1e-5):
        fix = 'return the sum over the samples (reduction="sum"), not the mean'
        raise UserError(
            f"{what}: loss_sum() of both is {loss.item():.6g}, of each alone {alone:.6g} in all; {fix}"
        )
    means = call(what, lambda: [torch.as_tensor(value).item() / count for value in (loss, *sums)])
    try:
        add_derived(dict(zip(("loss", *task.metrics), means, strict=True)), task)
    except UserError as error:
        # Of two samples a variance may be 0: that says nothing of the whole test set.
        if not isinstance(error.__cause__, ArithmeticError | ValueError):
            raise
    model.train()


def add_derived(means: dict[str, float], task: Task) -> dict[str, float]:
    """Return the averages and what the task derives from them, as plain numbers: a checkpoint takes nothing else.

    Raises:
        UserError: derive() fails or returns something else, or the task's headline is not among them.
    """
    what = f"--task {type(task).__name__}: derive()"
    derived = call(what, task.derive, dict(means))
    if not isinstance(derived, dict):
        raise UserError(f"{what} returned {_name(derived)}; return a dict of numbers")
    found = dict(means)
    for name, value in derived.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several values
            raise UserError(f"{what} returned {_name(value)} as {name!r}; return a number") from None
    if task.headline not in found:
        fix = f"set it to one of {', '.join(found)}, or let derive() return it"
        raise UserError(f"--task {type(task).__name__}: nothing has the headline's name {task.headline!r}; {fix}")
    return found


@torch.no_grad()
def check_sequence(model: nn.Module, sequence: Sequence[nn.Module], args: Options, data: Data) -> None:
    """Hold a model that says is_sequence to its word.

    Raises:
        UserError: its children one after another return something else than the model.
    """
    inputs, _ = _two_samples(data)
    inputs = inputs.to(next(model.parameters()).device)
    expected = model.eval()(inputs)
    output = inputs
    for module in sequence:
        output = call(f"--model {args.model}, child by child", module, output)
    if not isinstance(output, Tensor) or not (output.is_meta or torch.equal(output, expected)):
        fix = "remove is_sequence = True, or apply the children in order"
        raise UserError(f"--model {args.model}: its children one after another do not return what it does; {fix}")
    model.train()


def _two_samples(data: Data) -> Batch:
    ((inputs, targets),) = data.train.batches([torch.arange(min(2, len(data.train)))], 0)
    return inputs.cpu(), targets.cpu()


def build_task(args: Options, data: Data) -> Task:
    """Return --task, or what the targets of the data are for.

    Raises:
        UserError: the task does not go with the data, or is none.
    """
    if args.label_smoothing and (is_reference(args.task) or data.kind != "class"):
        raise UserError(f"--label-smoothing {args.label_smoothing} is for --task classification; drop it")
    if is_reference(args.task):
        task = call(f"--task {args.task}", load("--task", args.task))
        if not isinstance(task, Task):
            fix = "give a subclass of recipes.common.task.Task, without arguments"
            raise UserError(f"--task {args.task} makes a {type(task).__name__}; {fix}")
        return task
    if data.kind == "values" and args.task == "auto":
        fix = "add --task package.module:Class (docs/your-model.md)"
        raise UserError(f"--data {args.data}: no built-in task takes values; {fix}")
    needed = "classification" if data.kind == "class" else "language-model"
    if args.task not in ("auto", needed) or data.kind == "values":
        raise UserError(f"--task {args.task} does not go with --data {args.data}, whose targets are {data.kind}")
    if needed == "classification":
        return Classification(args.label_smoothing)
    if len(data.target.shape) != 1:
        raise UserError(f"--data {args.data}: targets of shape {data.target.shape}; tokens have the shape (T,)")
    return LanguageModel(data.target.shape[0], data.kind.removesuffix("s"), args.seed)
