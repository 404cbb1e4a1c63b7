"""Data of your own: a pair of tensors, or an indexable that worker processes read."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.common.data.splits import Batch, Data, Spec, Split
from recipes.common.data.workers import LoadedSplit, start_server
from recipes.common.errors import UserError, nearest
from recipes.common.options import Options
from recipes.common.seeding import mix
from recipes.common.task import SKIPPED
from recipes.common.user_code import call, load, name_of, refusal

KINDS = ("class", "tokens", "bytes", "values")
"""What a target may be; --task names what to do with `values`."""

FINGERPRINT_SAMPLES = 8
"""So many samples of an indexable go into its digest."""


@dataclass(frozen=True)
class Numbers:
    """Which classes or tokens there are: 0 to count - 1."""

    count: int
    are_inputs: bool
    """Whether inputs are tokens, too."""

    def wrong(self, inputs: Tensor, targets: Tensor) -> str:
        """Return which number of a sample, or of many, there is not; empty if there is none."""
        for what, values in (("input", inputs), ("target", targets))[not self.are_inputs :]:
            outside = (values >= self.count) | ((values < 0) & ((values != SKIPPED) | (what == "input")))
            if outside.any():
                return f"{what} {values[outside][0].item()} is none of 0 to {self.count - 1}"
        return ""


class OwnTensors(Split):
    """Samples that live on the device as they are.

    Args:
        inputs, targets: tensors whose first dimension counts samples.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets
        self.specs = _specs(inputs[0], targets[0])

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
    raises an error, or is unlike the stand-in, comes back as that, with what is wrong as a line: its rank has to
    stop with the others.

    Args:
        samples: the indexable.
        stand_in: a sample of it.
        what: its name, for people.
        seed: --seed.
        is_train: whether samples differ between epochs.
    """

    def __init__(self, samples: Any, stand_in: Any, what: str, seed: int, is_train: bool) -> None:
        inputs, targets = map(torch.as_tensor, stand_in)
        self.samples, self.stand_in, self.what = samples, (inputs, targets), what
        self.seed, self.is_train = seed, is_train
        self.specs = _specs(inputs, targets)
        self.numbers: Numbers | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: tuple[int, int]) -> tuple[tuple[Tensor, Tensor], str]:
        """Return a sample, and why it could not be read: empty if it could."""
        epoch, index = key
        value = mix(self.seed, epoch if self.is_train else 0, index)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(value)
            np.random.seed(value % 2**32)
            random.seed(value)
            fix = "fix it, then add --resume auto"
            try:
                inputs, targets = map(torch.as_tensor, self.samples[index])
                specs, wrong = _specs(inputs, targets), self.numbers and self.numbers.wrong(inputs, targets)
            except Exception as error:
                return self.stand_in, str(refusal(f"{self.what}[{index}] failed", error, fix))
        if specs != self.specs:
            first = f"{self.what.rpartition(' ')[2]}[0]"
            what = f"{self.what}[{index}] is {describe(specs)}, {first} {describe(self.specs)}"
            return self.stand_in, f"{what}; make all samples alike, then add --resume auto"
        return (self.stand_in, f"{self.what}[{index}]: {wrong}; {fix}") if wrong else ((inputs, targets), "")

    def read(self, index: int) -> tuple[Tensor, Tensor]:
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
        context = start_server() if args.workers else None
        super().__init__(dataset, args.workers, device, context, args.timeout_s)
        self.on_fault, self.specs = on_fault, dataset.specs

    def fingerprint(self) -> str:
        """Return what tells this split from another: its size and a digest of a few samples.

        Raises:
            UserError: one of them cannot be read.
        """
        some = range(0, len(self), -(-len(self) // FINGERPRINT_SAMPLES))
        values = [value for index in some for value in self.dataset.read(index)]
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
        raise UserError(f"{what} returned {name_of(found)}, not a dict; {fix}")
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
    if kind == "bytes" and num_classes != 256:
        raise UserError(f'{what}: bytes have 256 values; set "num_classes" to 256, or "target" to "tokens"')
    train = _split(f"{what}: 'train'", found["train"], args, device, on_fault, is_train=True)
    test = _split(f"{what}: 'test'", found["test"], args, device, on_fault, is_train=False)
    ours, theirs = train.specs, test.specs
    if ours != theirs:
        raise UserError(
            f"{what}: a sample of 'train' is {describe(ours)}, one of 'test' {describe(theirs)}; make them alike"
        )
    inputs, targets = ours
    if kind != "values" and targets.dtype != torch.int64:
        raise UserError(f"{what}: targets are {targets.dtype}; class and token numbers have to be torch.int64")
    if kind == "class" and targets.shape:
        raise UserError(f"{what}: targets have the shape {targets.shape}; give one class number for each sample")
    if num_classes and kind != "values":
        numbers = Numbers(num_classes, are_inputs=kind != "class" and inputs.dtype == torch.int64)
        _check_numbers(numbers, {f"{what}: 'train'": train, f"{what}: 'test'": test})
    return Data(train, test, inputs, targets, num_classes, kind)


def _check_numbers(numbers: Numbers, splits: Mapping[str, OwnTensors | OwnSamples]) -> None:
    """Raise UserError for tensors with a number that there is not; samples are looked at when they are read."""
    for name, split in splits.items():
        if isinstance(split, OwnSamples):
            split.dataset.numbers = numbers
        elif wrong := numbers.wrong(split.inputs, split.targets):
            raise UserError(f'{name}: {wrong}; fix it, or "num_classes"')


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
        raise UserError(f"{what} is {name_of(samples)}; {fix}")
    if not len(samples):
        raise UserError(f"{what} is empty; give at least one sample")
    sample = call(f"{what}[0]", samples.__getitem__, 0)
    if not isinstance(sample, Sequence) or len(sample) != 2:
        raise UserError(f"{what}[0] is {name_of(sample)}; each sample has to be a pair (input, target)")
    dataset = call(f"{what}[0]", SeededSamples, samples, sample, what, args.seed, is_train)
    return OwnSamples(dataset, args, device, on_fault)


def _specs(inputs: Tensor, targets: Tensor) -> tuple[Spec, Spec]:
    """Return what the input and the target of a sample are."""
    return Spec(tuple(inputs.shape), inputs.dtype), Spec(tuple(targets.shape), targets.dtype)


def describe(specs: tuple[Spec, Spec]) -> str:
    """Return a sample's specs in words."""
    return f"{specs[0]} and {specs[1]}"
