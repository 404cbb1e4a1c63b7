"""Data of your own: a pair of tensors, or an indexable that worker processes read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from recipes.common.data.splits import Batch, Data, MemorySplit, Spec, Split, digest
from recipes.common.data.workers import LoadedSplit, Sample, check_sendable, read_evenly
from recipes.common.errors import UserError, nearest
from recipes.common.options import Options
from recipes.common.seeding import hash_seed, seed_all
from recipes.common.task import SKIPPED
from recipes.common.user_code import call_user_code, import_user_code, name_of, refusal

KINDS = ("class", "tokens", "bytes", "values")
"""The kinds of targets; `values` need a --task of the user's."""

FINGERPRINT_SAMPLES = 8
"""Up to this many samples of an indexable go into its digest."""


@dataclass(frozen=True)
class Numbers:
    """The valid classes or tokens: 0 to count - 1, or anything if count is None (targets are values)."""

    count: int | None
    are_inputs: bool
    """Whether inputs are tokens, too."""

    def wrong(self, inputs: Tensor, targets: Tensor) -> str:
        """Return which number of one or more samples is invalid; "" if all numbers are valid."""
        if self.count is None:
            return ""
        for what, values in (("input", inputs), ("target", targets))[not self.are_inputs :]:
            outside = (values >= self.count) | ((values < 0) & ((values != SKIPPED) | (what == "input")))
            if outside.any():
                return f"{what} {values[outside][0].item()} is not in 0 to {self.count - 1}"
        return ""


class SeededSamples(Dataset[Any]):
    """The samples of an indexable by (epoch, index), which seeds what it draws at random.

    So a sample is augmented in the same way on any rank and in any worker process, and after a resume. If a sample
    raises an error, differs from the first in shape or dtype, or has an invalid number, the first is returned in
    its place, with one line on what is wrong: its rank has to stop together with the others.

    `what` is the indexable's name in messages; with `is_train`, samples differ between epochs.
    """

    def __init__(self, samples: Any, first: Batch, numbers: Numbers, what: str, seed: int, is_train: bool) -> None:
        self.samples, self.first, self.numbers, self.what = samples, first, numbers, what
        self.seed, self.is_train = seed, is_train
        self.count = len(samples)  # once: steps and epochs are counted by it

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        value = hash_seed(self.seed, epoch if self.is_train else 0, index)
        what, fix = f"{self.what}[{index}]", "fix it, then add --resume auto"
        with torch.random.fork_rng(devices=[]):
            seed_all(value)
            try:
                inputs, targets = map(_as_tensor, self.samples[index])
                specs, wrong = _specs(inputs, targets), self.numbers.wrong(inputs, targets)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and not get_worker_info():
                    raise
                refused = refusal(f"{what} failed", error, fix)
                return Sample(*self.first, str(refused), is_passing=refused.status == 1)
        if specs != _specs(*self.first):
            like = f"{self.what.rpartition(' ')[2]}[0] {describe(_specs(*self.first))}"
            fix = "make all samples alike, then add --resume auto"
            return Sample(*self.first, f"{what} is {describe(specs)}, {like}; {fix}")
        return Sample(*self.first, f"{what}: {wrong}; {fix}") if wrong else Sample(inputs, targets)

    def fingerprint(self) -> str:
        """Return a string that identifies these samples: their number and a digest of a few.

        Raises UserError if one of them cannot be read, or differs when it is read again.
        """
        found, again = (
            digest(*(value for sample in read_evenly(self, FINGERPRINT_SAMPLES) for value in sample[:2]))
            for _ in range(2)
        )
        if again != found:
            what = f"{self.what}[i] returns something else when it is called again"
            what += ": it draws from a generator of its own, or changes its data"
            fix = "use torch.rand, random.* or numpy.random.* functions, which are seeded for each sample"
            raise UserError(f"{what}; {fix}, or seed the generator in [i], by a number from torch.randint()")
        return f"{len(self)} samples with digest {found:08x}"


def load_user_data(args: Options, device: torch.device, on_fault: Callable[[UserError], None]) -> Data:
    """Return the data set of the user's function; `on_fault` gets the error of a sample that does not load later.

    The function takes no arguments and returns a dict: "train" and "test", each a pair of tensors or arrays
    (inputs, targets) or an indexable of such pairs for one sample; "target", one of KINDS; and "num_classes", the
    number of classes or of different tokens, unless targets are values.

    Raises UserError if it fails or returns something else.
    """
    what = f"--data {args.data}"
    function = import_user_code("--data", args.data)
    seed_all(0)  # not --seed: another one keeps the test set
    found = call_user_code(what, function)
    kind, num_classes = _target_of(found, what)
    splits = {split: _without_graph(f"{what}: {split!r}", found[split]) for split in ("train", "test")}
    first = {split: _first_sample(f"{what}: {split!r}", samples) for split, samples in splits.items()}
    ours, theirs = _specs(*first["train"]), _specs(*first["test"])
    if ours != theirs:
        lack = f"a sample of 'train' is {describe(ours)}, one of 'test' {describe(theirs)}"
        raise UserError(f"{what}: {lack}; make them alike")
    inputs, targets = ours
    wanted = Spec(() if kind == "class" else targets.shape, torch.int64)
    if kind != "values" and targets != wanted:
        fix = "convert it, or use 'values' and a --task of your own"
        raise UserError(f"{what}: a target is {targets}; of kind {kind!r} it has to be {wanted}; {fix}")
    are_inputs = kind != "class" and inputs.dtype == torch.int64
    numbers = Numbers(num_classes if kind != "values" else None, are_inputs)

    def load_split(split: str) -> Split:
        name, samples = f"{what}: {split!r}", splits[split]
        if not _are_tensors(samples):
            dataset = SeededSamples(samples, first[split], numbers, name, args.seed, split == "train")
            if args.workers:
                check_sendable(dataset, name)
            return LoadedSplit(dataset, args, device, on_fault)
        if wrong := numbers.wrong(*samples):
            raise UserError(f'{name}: {wrong}; fix it, or "num_classes"')
        if kind != "values" and split == "train" and bool((samples[1] == SKIPPED).all()):
            raise UserError(f"{name}: all targets are {SKIPPED}, so none is counted; give classes or tokens")
        return MemorySplit(*(tensor.to(device) for tensor in samples))

    train, may_skip = splits["train"], kind != "values"
    if may_skip and _are_tensors(train):
        may_skip = bool((train[1] == SKIPPED).any())
    return Data(load_split("train"), load_split("test"), inputs, targets, num_classes, kind, may_skip=may_skip)


def _target_of(found: Any, what: str) -> tuple[str, Any]:
    """Return "target" and "num_classes" of what a user's function has returned; raises UserError."""
    fix = f'return {{"train": ..., "test": ..., "target": one of {", ".join(KINDS)}, "num_classes": N}}'
    if missing := [key for key in ("train", "test", "target") if not isinstance(found, dict) or key not in found]:
        raise UserError(f"{what} returned {name_of(found)} without {missing[0]!r}; {fix}")
    kind, num_classes = found["target"], found.get("num_classes")
    if isinstance(num_classes, np.integer):  # such as labels.max() + 1
        num_classes = int(num_classes)
    if kind not in KINDS:
        raise UserError(f"{what}: unknown target {kind!r}{nearest(str(kind), KINDS)}; {fix}")
    if kind != "values" and (not isinstance(num_classes, int) or num_classes < 1):
        fix = "give the number of classes or different tokens"
        raise UserError(f'{what}: "num_classes" is {num_classes!r}; {fix}')
    if kind == "bytes" and num_classes != 256:
        raise UserError(f'{what}: bytes have 256 values; set "num_classes" to 256, or "target" to "tokens"')
    return kind, num_classes


def _are_tensors(samples: Any) -> bool:
    is_pair = isinstance(samples, Sequence) and len(samples) == 2
    return is_pair and all(isinstance(part, Tensor | np.ndarray) for part in samples)


def _without_graph(what: str, samples: Any) -> Any:
    """Return a pair of tensors as _as_tensor() does, and anything else as it is; raises UserError."""
    return [call_user_code(what, _as_tensor, tensor) for tensor in samples] if _are_tensors(samples) else samples


def _as_tensor(value: Any) -> Tensor:
    """Return an input or a target as a tensor of its values, apart from the graph that computed it.

    Raises TypeError, ValueError or RuntimeError if it has none, or no bytes for them.
    """
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch would warn that nothing keeps it from writing there
    tensor = torch.as_tensor(value).detach()
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        raise TypeError("a tensor is sparse, nested or on the meta device; to_dense() makes a dense one")
    return tensor.resolve_conj().resolve_neg()


def _first_sample(what: str, samples: Any) -> Batch:
    """Return the first sample of a split; raises UserError if the split is empty or of another form."""
    if _are_tensors(samples):
        inputs, targets = samples
        counts = [len(tensor) if tensor.ndim else 0 for tensor in samples]
        if counts == [0, 0] and inputs.ndim and targets.ndim:
            raise UserError(f"{what} is empty; give at least one sample")
        if counts[0] != counts[1] or not counts[1]:
            raise UserError(f"{what} has {counts[0]} inputs and {counts[1]} targets; give as many of each")
        return inputs[0], targets[0]
    if isinstance(samples, IterableDataset):
        fix = "give a map-style data set (for Parquet: read row groups in [i]), or use a script of your own"
        raise UserError(f"{what} is a stream without [i] ({name_of(samples)}); {fix}")
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        fix = "give two tensors or arrays, or an object with len() and [i], such as a torch.utils.data.Dataset"
        raise UserError(f"{what} is {name_of(samples)}; {fix}")
    if not call_user_code(f"{what}: len()", len, samples):
        raise UserError(f"{what} is empty; give at least one sample")
    sample = call_user_code(f"{what}[0]", samples.__getitem__, 0)
    if not isinstance(sample, Sequence) or len(sample) != 2:
        raise UserError(f"{what}[0] is {name_of(sample)}; each sample has to be a pair (input, target)")
    try:
        inputs, targets = map(_as_tensor, sample)
    except (TypeError, ValueError, RuntimeError) as error:
        found, reason = " and ".join(map(name_of, sample)), " ".join(str(error).split())[:300]
        raise UserError(f"{what}[0] is a pair of {found}; return tensors, arrays or numbers ({reason})") from None
    return inputs, targets


def _specs(inputs: Tensor, targets: Tensor) -> tuple[Spec, Spec]:
    """Return the specs of a sample's input and target."""
    return Spec(tuple(inputs.shape), inputs.dtype), Spec(tuple(targets.shape), targets.dtype)


def describe(specs: tuple[Spec, Spec]) -> str:
    """Return a sample's specs in words."""
    return f"{specs[0]} and {specs[1]}"
