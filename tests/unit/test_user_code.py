"""Models, data, tasks and optimizers of the user's own: what fits is taken as it is, what does not is one line with the fix."""

# ruff: noqa: E501 (messages stand in one line)

import contextlib
import copy
import importlib
import random
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from recipes.common import user_code
from recipes.common.data import load_data, workers
from recipes.common.errors import UserError
from recipes.common.loop import half_weights
from recipes.common.models.models import build_model
from recipes.common.models.user_model import (
    build_user_model,
    check_fit,
    check_input,
    check_on,
    check_sparse,
    exact_output,
)
from recipes.common.optim import build_optimizer, optimizer_state, set_learning_rate
from recipes.common.parallel.buckets import find_unused
from recipes.common.restore import load_optimizer_state
from recipes.common.sample import make_sample
from recipes.common.world import agreement
from recipes.common.world.peers import Peers
from recipes.single.train import options
from tests.conftest import refused

CPU = torch.device("cpu")

MODULE = """
import json
import multiprocessing
import random
import sys
import time
import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss
from recipes.common.task import Task

X = torch.linspace(-1, 1, 24).view(12, 2)

def images():
    x = torch.zeros(4, 1, 8, 8)
    return {"train": (x, torch.arange(4)), "test": (x, torch.arange(4)), "target": "class", "num_classes": 4}

class Noisy:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return X[index] + torch.rand(2) + random.random() + np.random.rand(), index % 3

class BrokenAt7(Noisy):
    def __getitem__(self, index):
        return super().__getitem__({i: i for i in range(12) if i != 7}[index])

class ExitsAt7(Noisy):
    def __getitem__(self, index):
        return sys.exit("no sample") if index == 7 else super().__getitem__(index)

class UnreadAt7(Noisy):
    def __getitem__(self, index):
        if index == 7:
            raise OSError(116, "Stale file handle")
        return super().__getitem__(index)

class Panic(BaseException):
    "As extensions that are written in Rust raise it."

class PanicsAt7(Noisy):
    def __getitem__(self, index):
        if index == 7:
            raise Panic("called `Option::unwrap()` on a `None` value")
        return super().__getitem__(index)

class InterruptsAt7(Noisy):
    def __getitem__(self, index):
        if index == 7:
            raise KeyboardInterrupt
        return super().__getitem__(index)

def on_default(data):
    torch.set_default_device("meta")
    return nn.Linear(2, 3)

def panics(*args):
    raise Panic("no GPU")

class Graph(Noisy):
    def __getitem__(self, index):
        return 2 * X[index].requires_grad_(), index % 3

def conjugate():
    x = torch.view_as_complex(X.clone()).conj().unsqueeze(1)
    return {**noisy(), "train": [(x[i], i % 3) for i in range(12)], "test": (x, torch.arange(12) % 3)}

class OwnGenerator(Noisy):
    def __init__(self):
        self.generator = np.random.default_rng(0)
    def __getitem__(self, index):
        return X[index] + self.generator.random(), index % 3

class Reseeded(OwnGenerator):
    def __getitem__(self, index):
        self.generator = np.random.default_rng(int(torch.randint(2**31, ())))
        return super().__getitem__(index)

class InPlaceEachTime(Noisy):
    def __init__(self):
        self.x = X.clone()
    def __getitem__(self, index):
        return self.x[index].mul_(2), index % 3

class Lazy(Noisy):
    file = None
    def __getitem__(self, index):
        if self.file is None:
            self.file = open("mine.py")
        return X[index], index % 3

class LazyApart(Lazy):
    def __getstate__(self):
        return {**vars(self), "file": None}

class NoLength(Noisy):
    def __len__(self):
        return len(self.files)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(X[0], 0)])

class StreamOfTwelve(Stream):
    def __len__(self):
        return 12

class Grows(Noisy):
    length = 12
    def __len__(self):
        self.length += 1
        return self.length - 1

class LongerAt7(Noisy):
    def __getitem__(self, index):
        return torch.zeros(2 + (index == 7)), index % 3

class Class3At7(Noisy):
    def __getitem__(self, index):
        return torch.zeros(2), 3 if index == 7 else -100

def token_9():
    x = torch.full((4, 8), 9)
    return {"train": (x, x - 9), "test": (x, x - 9), "target": "tokens", "num_classes": 9}

def token_skipped():
    x = torch.zeros(4, 8, dtype=torch.int64)
    return {"train": (x - 100, x), "test": (x, x), "target": "tokens", "num_classes": 9}

def tokens_unlabelled():
    x = torch.zeros(4, 8, dtype=torch.int64)
    return {"train": (x, x - 100), "test": (x, x - 100), "target": "tokens", "num_classes": 9}

def arrays():
    pair = X.numpy(), np.arange(12) % 3
    return {**noisy(), "train": pair, "test": [*pair]}

class Lists(Noisy):
    def __getitem__(self, index):
        return [1.0, float(index)], 0.5 * index

class Holds(Noisy):
    def __init__(self, held):
        self.held = [X, held]

def net(data):
    return nn.Linear(data.input.shape[0], data.num_classes or 1)

def drawn():
    order = torch.randperm(12) + 12 * torch.from_numpy(np.random.permutation(12))
    targets = torch.tensor(random.sample(range(12), 12))
    return {"train": (order.float(), targets), "test": (order.float(), targets), "target": "class", "num_classes": 12}

def bias_first(named_parameters, lr, weight_decay):
    names = dict(named_parameters)
    groups = [{"params": names["bias"], "lr": lr / 4}, {"params": names["weight"], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)

class KeepsFunction(torch.optim.SGD):
    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["now"] = time.time

class KeepsMore(torch.optim.SGD):
    def step(self, closure=None):
        self.state["all"] = {"steps": 1}

keeps_function = lambda named, lr, decay: KeepsFunction([p for _, p in named], lr)
keeps_more = lambda named, lr, decay: KeepsMore([p for _, p in named], lr)
needs_closure = lambda named, lr, decay: torch.optim.LBFGS([p for _, p in named], lr)
weight_only = lambda named, lr, decay: torch.optim.SGD([dict(named)["weight"]], lr)
a_copy = lambda named, lr, decay: torch.optim.SGD([p.clone().detach() for _, p in named], lr)
no_rate = lambda named, lr, decay: torch.optim.Optimizer([p for _, p in named], {})

class Fit(Task):
    metrics = ("absolute_error",)
    def loss_sum(self, output, target):
        return mse_loss(output[:, 0], target, reduction="sum")
    def metric_sums(self, output, target):
        return ((output[:, 0] - target).abs().sum(),)
    def derive(self, averages):
        return {"rms_error": averages["loss"] ** 0.5}

class Mean(Fit):
    def loss_sum(self, output, target):
        return mse_loss(output[:, 0], target)

class NoGradient(Fit):
    def loss_sum(self, output, target):
        return mse_loss(output[:, 0], target, reduction="sum").detach()

class TooFew(Fit):
    def metric_sums(self, output, target):
        return ()

class ChangesOutput(Fit):
    def loss_sum(self, output, target):
        output[:, 0] -= target
        return output[:, 0].square().sum()

class NoCount(Fit):
    def count(self, target):
        return (target > 0).sum(1)

class CountsShare(Fit):
    def count(self, target):
        return (target > -9).float().mean()

class CountsEach(Fit):
    def count(self, target):
        return target > 0

class NoTuple(Fit):
    def metric_sums(self, output, target):
        return (output.flatten() - target).abs().sum()

class NoNumber(Fit):
    def derive(self, averages):
        return {"rms_error": [averages["loss"]]}

class NoDict(Fit):
    def derive(self, averages):
        return averages["loss"] ** 0.5

class NoHeadline(Fit):
    headline = "rms"

class NoSuchMean(Fit):
    def derive(self, averages):
        return {"rms_error": averages["los"] ** 0.5}

class Undefined(Fit):
    def derive(self, averages):
        return {"rms_error": averages["loss"] / 0}

class Count(Task):
    metrics = ("correct",)
    def loss_sum(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="sum")
    def metric_sums(self, output, target):
        return ((output.argmax(1) == target).sum(),)

class ChangesTarget(Count):
    def metric_sums(self, output, target):
        return (target.clamp_(max=1).eq(output.argmax(1)).sum(),)

class Share(Count):
    def metric_sums(self, output, target):
        return ((output.argmax(1) == target).float().mean(),)

class Sure(Count):
    def metric_sums(self, output, target):
        values, classes = output.max(1)
        return ((values == 1).logical_and(classes == target).float().mean(),)

class Pairs(Count):
    def loss_sum(self, output, target):
        return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)), reduction="sum")

class Largest(Fit):
    def metric_sums(self, output, target):
        return ((output[:, 0] - target).abs().max(),)

class TwoLosses(Fit):
    metrics = ("loss",)

class Weighted(Count):
    def __init__(self):
        self.weights = torch.ones(3)
    def loss_sum(self, output, target):
        return super().loss_sum(output * self.weights, target)

class Trained(Count):
    def __init__(self):
        self.scale = nn.Linear(3, 3)

class Frozen(Count):
    def __init__(self):
        self.other = nn.Linear(3, 3).requires_grad_(False)

class NoTask:
    pass

class LeavesOut(nn.Linear):
    def __init__(self, data):
        super().__init__(2, 3)
    def state_dict(self, **how):
        return {name: value for name, value in super().state_dict(**how).items() if name != "weight"}

class NeverSet(LeavesOut):
    state_dict = nn.Module.state_dict
    def get_extra_state(self):
        return 1

class Named(nn.Linear):
    def __init__(self, data):
        super().__init__(2, 3)
    def forward(self, *, inputs):
        return super().forward(inputs)

class Sparse(nn.Linear):
    def __init__(self, data):
        super().__init__(2, 3)
        self.register_buffer("graph", torch.eye(2).to_sparse())

def on_meta(data):
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to("meta")

def lazy(data):
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(data.num_classes))

class Keeps(nn.Linear):
    def __init__(self, data):
        super().__init__(2, 3)
    def get_extra_state(self):
        return self.kept
    def set_extra_state(self, state):
        pass

class KeepsObject(Keeps):
    kept = np.random.default_rng(0)

class KeepsNumbers(Keeps):
    kept = {"a": [1, 2.5], "b": X}

class Untrue(nn.Module):
    is_sequence = True
    def __init__(self, data):
        super().__init__()
        self.one, self.two = nn.Linear(2, 1), nn.Linear(1, 1)
    def forward(self, inputs):
        return self.two(self.one(inputs)) + 1

class Doubles(nn.Module):
    def forward(self, inputs):
        return inputs.mul_(2)

class InPlace(nn.Sequential):
    is_sequence = True

class Centres(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs - inputs.mean(0))

SHARDED = nn.Linear(2, 3)
SHARDED.weight.device_mesh = "a mesh"
one_for_all = lambda data: SHARDED
class Drops(nn.Linear):
    def __init__(self, data):
        super().__init__(2, 3)
    def forward(self, inputs):
        return super().forward(inputs) * (torch.arange(len(inputs)) < 1)[:, None]

class Draws(Drops):
    def forward(self, inputs):
        return nn.Linear.forward(self, inputs) + torch.rand(len(inputs), 3)

in_place = lambda data: InPlace(Doubles(), nn.Linear(2, 3))
centres_in_place = lambda data: InPlace(Doubles(), Centres(2, 3))

class Views(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.one, self.two, self.linear = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3), nn.Linear(32, 4)
    def forward(self, inputs):
        return self.linear(self.two(self.one(inputs)).view(len(inputs), -1))

class ViewGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs.clone()
    @staticmethod
    def backward(context, gradient):
        return gradient.view(-1).view(gradient.shape)

class ViewsGradient(Views):
    def forward(self, inputs):
        return self.linear(self.two(ViewGradient.apply(self.one(inputs))).flatten(1))

class Tokens(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(1), nn.Linear(2, 3)
    def forward(self, inputs):
        return self.linear(self.norm(inputs.view(-1, 1)).view(-1, 2))

class Norm(Tokens):
    def forward(self, inputs):
        return self.linear(self.norm(inputs[:, None])[:, 0])

def volumes():
    x = torch.zeros(4, 1, 4, 4, 4)
    return {"train": (x, torch.arange(4)), "test": (x, torch.arange(4)), "target": "class", "num_classes": 4}

def conv3d(data):
    return nn.Sequential(nn.Conv3d(1, 2, 3), nn.Flatten(), nn.Linear(16, 4))

NUMBER = 3
data = lambda: {"train": (X, X.sum(1)), "test": (X[:4], X[:4].sum(1)), "target": "values"}
classes = lambda: {"train": (X, torch.arange(12) % 3), "test": (X, torch.arange(12) % 3), "target": "class", "num_classes": 3}
broken_at_7 = lambda: {**noisy(), "train": BrokenAt7()}
unread_at_7 = lambda: {**noisy(), "train": UnreadAt7()}
panics_at_7 = lambda: {**noisy(), "train": PanicsAt7()}
interrupts_at_7 = lambda: {**noisy(), "train": InterruptsAt7()}
exits_at_7 = lambda: {**noisy(), "train": ExitsAt7()}
graph = lambda: {**noisy(), "train": Graph(), "test": (2 * X.clone().requires_grad_(), torch.arange(12) % 3)}
sparse = lambda: {**noisy(), "train": (X.to_sparse(), torch.arange(12) % 3)}
sparse_samples = lambda: {**noisy(), "test": [(X[0].to_sparse(), 0)]}
big_endian = lambda: {**noisy(), "train": [(X.numpy()[0].astype(">f4"), 0)]}
scalars = lambda: {**noisy(), "train": (torch.tensor(1.0), torch.tensor(0))}
no_length = lambda: {**noisy(), "train": NoLength()}
grows = lambda: {**noisy(), "train": Grows()}
longer_at_7 = lambda: {**noisy(), "train": LongerAt7()}
unlabelled = lambda: {**noisy(), "train": (X, torch.full((12,), -100))}
class_3 = lambda: {**noisy(), "train": (X, torch.arange(len(X)) % 4)}
class_3_at_7 = lambda: {**noisy(), "train": Class3At7()}
lists = lambda: {"train": Lists(), "test": Lists(), "target": "values"}
words = lambda: {"train": [("a", 1)], "test": [("b", 0)], "target": "class", "num_classes": 2}
not_finite = lambda: {**lists(), "train": (X * float("nan"), X[:, 0])}
holds_lambda = lambda: {**noisy(), "test": Holds(lambda x: x)}
holds_file = lambda: {**noisy(), "train": Holds(open("mine.py"))}
holds_opened = lambda: {**noisy(), "train": Lazy()}
holds_arrays = lambda: {**noisy(), "train": Holds({"a": X.numpy(), "b": X.numpy(), "c": X})}
lazy_apart = lambda: {**noisy(), "train": LazyApart()}
own_generator = lambda: {**noisy(), "train": OwnGenerator()}
reseeded = lambda: {**noisy(), "train": Reseeded()}
stream = lambda: {**noisy(), "train": Stream()}
stream_of_twelve = lambda: {**noisy(), "train": StreamOfTwelve()}
in_place_each_time = lambda: {**noisy(), "train": InPlaceEachTime()}
holds_lock = lambda: {**noisy(), "train": Holds(multiprocessing.get_context("forkserver").Lock())}
ascii = lambda: {**token_9(), "target": "bytes", "num_classes": 128}
noisy = lambda: {"train": Noisy(), "test": Noisy(), "target": "class", "num_classes": 3}
empty = lambda: {**noisy(), "test": (X[:0], torch.arange(0))}
numpy_classes = lambda: {**noisy(), "num_classes": np.int64(2) + 1}
nothing = lambda *args: None
wrong_shape = lambda data: nn.Flatten(0)
few_classes = lambda data: nn.Linear(2, 2)
half = lambda data: nn.Linear(2, 3).bfloat16()
half_frozen = lambda data: nn.Sequential(nn.Linear(2, 2).half().requires_grad_(False), nn.Linear(2, 3))
fails = lambda *args: 1 / 0
reads = lambda *args: json.loads("{")
no_target = lambda: {"train": (X, X), "test": (X, X)}
unknown_target = lambda: {**data(), "target": "clas"}
no_number = lambda: {**classes(), "num_classes": None}
float_class = lambda: {**classes(), "train": (X, X.sum(1)), "test": (X, X.sum(1))}
unlike = lambda: {**classes(), "test": (X[:, :1], torch.arange(12) % 3)}
uneven = lambda: {**classes(), "train": (X, torch.arange(11) % 3)}
no_pairs = lambda: {**classes(), "train": [1, 2]}
no_sequence = lambda: {**classes(), "train": iter([1])}
none = lambda: {**classes(), "train": []}
"""


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Change to a folder with the user's modules, none of which is imported before or after."""
    texts = {
        "mine": MODULE,
        "broken": "import torch\nX = undefined\n",
        "syntax": "def f(:\n",
        "needs": "import not_installed\n",
        "exits": "import sys\nsys.exit(0)\n",
        "meta": "import torch\ntorch.set_default_device('meta')\n",
        "gpu": "import torch\ntorch.set_default_device('cuda')\n",
        "moves": "import os\nos.chdir('/')\n",
        "panics": "raise BaseException('at once')\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)  # another test's
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in texts:
        sys.modules.pop(name, None)


def load(*argv):
    args = options([*argv, "--workers", "0"])
    data = load_data(args, CPU, print)
    return data, build_model(args, data)


def test_own_data_model_and_task_are_taken_as_they_are():
    data, model = load("--data", "mine:data", "--model", "mine:net", "--task", "mine:Fit")
    assert (len(data.train), len(data.test), data.kind, data.num_classes) == (12, 4, "values", None)
    assert isinstance(model, nn.Linear)
    assert type(data.task).__name__ == "Fit"
    assert data.task.derive({"loss": 4.0}) == {"rms_error": 2.0}
    ((inputs, targets),) = data.train.batches([torch.tensor([5, 0])], 0)
    assert torch.equal(inputs.sum(1), targets)
    assert targets[1] == inputs[1].sum() == pytest.approx(-2 + 2 / 23)


def test_the_number_of_classes_may_be_numpys():
    data, _ = load("--data", "mine:numpy_classes", "--model", "mine:net")
    assert (data.num_classes, type(data.num_classes)) == (3, int)


def test_own_images_go_with_built_in_models():
    data, model = load("--data", "mine:images")
    assert (data.channels, data.image_size, data.num_classes) == (1, 8, 4)
    assert type(model).__name__ == "LeNet"
    assert type(data.task).__name__ == "Classification"


def test_what_a_sample_draws_depends_on_seed_epoch_and_index_alone():
    def read(indices, epoch, *argv, split="train"):
        data, _ = load("--data", "mine:noisy", "--model", "mine:net", *argv)
        inputs = torch.cat([batch for batch, _ in getattr(data, split).batches(indices, epoch)])
        return inputs, data.train.fingerprint()

    whole, fingerprint = read([torch.arange(12)], 3)
    parts, other = read([torch.tensor([7, 2]), torch.tensor([11])], 3)
    assert torch.equal(parts, whole[[7, 2, 11]])
    assert fingerprint == other
    assert not torch.equal(read([torch.arange(12)], 4)[0], whole)
    assert not torch.equal(read([torch.arange(12)], 3, "--seed", "1")[0], whole)
    tests = [read([torch.arange(12)], epoch, split="test")[0] for epoch in (1, 2)]
    assert torch.equal(*tests)


def test_reading_a_sample_leaves_the_rank_s_random_numbers_alone():
    data, _ = load("--data", "mine:noisy", "--model", "mine:net")
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(data.train.batches([torch.arange(4)], 0))
    assert torch.equal(torch.rand(3), expected)


def test_a_worker_reads_what_the_rank_would_read():
    args = options(["--data", "mine:noisy", "--model", "mine:net", "--workers", "1"])
    data = load_data(args, CPU, print)
    ((ours, labels),) = data.train.batches([torch.tensor([3, 8])], 1)
    alone, _ = load("--data", "mine:noisy", "--model", "mine:net")
    ((theirs, _),) = alone.train.batches([torch.tensor([3, 8])], 1)
    assert torch.equal(ours, theirs)
    assert labels.tolist() == [0, 2]


def test_what_the_function_draws_is_the_same_at_every_launch():
    """Such as train_test_split()'s: --evaluate would test a run's weights on samples that it was trained on."""
    found = set()
    for seed in ("0", "0", "1"):
        for draw in (np.random.seed, random.seed, torch.seed):
            draw()  # anew, as when a process starts
        data = load_data(options(["--data", "mine:drawn", "--seed", seed]), CPU, print)
        found.add((data.train.fingerprint(), data.test.fingerprint()))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lambda", r"'test': worker processes cannot get it: .*lambda.*"),
        ("file", "'train': .*TextIOWrapper.*"),
        ("opened", "'train': .*TextIOWrapper.*"),
    ],
)
def test_what_workers_cannot_get_is_one_line_before_the_training(name, reason):
    argv = ["--data", f"mine:holds_{name}", "--model", "mine:net", "--workers"]
    with pytest.raises(
        UserError, match=rf"^--data mine:holds_{name}: {reason}; define .*, drop open .*, or add --workers 0$"
    ):
        load_data(options([*argv, "1"]), CPU, print)
    load_data(options([*argv, "0"]), CPU, print)


def test_a_file_that_a_sample_opens_stays_out_of_the_workers_copy():
    args = options(["--data", "mine:lazy_apart", "--model", "mine:net", "--workers", "1"])
    ((_, labels),) = load_data(args, CPU, print).train.batches([torch.tensor([3, 8])], 1)
    assert labels.tolist() == [0, 2]


def test_large_arrays_that_are_copied_to_workers_are_warned_of(monkeypatch, capsys):
    monkeypatch.setattr(workers, "MAX_COPIED_BYTES", 24 * 4)
    argv = ["--data", "mine:holds_arrays", "--model", "mine:net", "--workers"]
    load_data(options([*argv, "1"]), CPU, print)
    said = "--data mine:holds_arrays: 'train': 0.0 GB of NumPy arrays are copied to each worker: use a torch"
    assert capsys.readouterr().err.startswith(f"warning: {said}")
    for rank, count in (("1", "1"), ("0", "0")):
        monkeypatch.setenv("RANK", rank)
        load_data(options([*argv, count]), CPU, print)
    monkeypatch.setattr(workers, "MAX_COPIED_BYTES", 2 * 24 * 4)  # the two arrays, and no tensor
    load_data(options([*argv, "1"]), CPU, print)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["own_generator", "in_place_each_time"])
def test_samples_that_differ_when_they_are_read_again_are_refused(name):
    """They would depend on the number of workers and of ranks."""
    data, _ = load("--data", f"mine:{name}", "--model", "mine:net")
    said = rf"^--data mine:{name}: 'train'\[i\] returns something else when it is called again: it draws.*, or seed the generator in \[i\], by a"
    with pytest.raises(UserError, match=said):
        data.train.fingerprint()
    assert data.test.fingerprint() == data.test.fingerprint()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_that_a_sample_seeds_may_be_the_data_sets_own(workers):
    """As those of Albumentations are."""
    argv = ["--data", "mine:reseeded", "--model", "mine:net", "--workers"]
    data, alone = (load_data(options([*argv, str(count)]), CPU, print) for count in (workers, 0))
    assert data.train.fingerprint() == alone.train.fingerprint()
    ((ours, _),), ((theirs, _),) = (one.train.batches([torch.tensor([3, 8])], 1) for one in (data, alone))
    assert torch.equal(ours, theirs)


def test_a_lock_goes_to_a_worker_alone():
    args = options(["--data", "mine:holds_lock", "--model", "mine:net", "--workers", "1"])
    ((_, labels),) = load_data(args, CPU, print).train.batches([torch.tensor([3, 8])], 1)
    assert labels.tolist() == [0, 2]


def read_bad_sample(name, *indices, workers=0):
    """Return the training samples of these indices, and the one error that is reported."""
    errors = []
    args = options(["--data", f"mine:{name}", "--model", "mine:net", "--workers", str(workers)])
    ((inputs, labels),) = load_data(args, CPU, errors.append).train.batches([torch.tensor(indices)], 0)
    (error,) = errors
    assert error.status == (1 if name == "unread_at_7" else 2)
    return inputs, labels.tolist(), str(error)


@pytest.mark.parametrize(
    ("name", "reason", "workers"),
    [
        ("broken", "KeyError: 7", 0),
        ("unread", "OSError: [Errno 116] Stale file handle", 1),
        ("exits", "SystemExit: no sample", 0),
        ("panics", "Panic: called `Option::unwrap()` on a `None` value", 0),
        ("interrupts", "KeyboardInterrupt: ", 1),
    ],
)
def test_a_sample_that_raises_an_error_is_reported_and_replaced(name, reason, workers):
    inputs, labels, error = read_bad_sample(f"{name}_at_7", 7, 3, workers=workers)
    assert (inputs.shape, labels) == ((2, 2), [0, 0])
    assert error.startswith(f"--data mine:{name}_at_7: 'train'[7] failed: {reason} (")
    assert error.endswith("; fix it, then add --resume auto")


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_taken_without_the_graph_that_computed_them(workers):
    args = options(["--data", "mine:graph", "--model", "mine:net", "--workers", str(workers)])
    data = load_data(args, CPU, print)
    x = torch.linspace(-2, 2, 24).view(12, 2)
    for split in (data.train, data.test):
        ((inputs, _),) = split.batches([torch.tensor([7, 4])], 0)
        assert torch.allclose(inputs, x[[7, 4]])
        assert not inputs.requires_grad


def test_conjugate_samples_have_a_digest_of_their_values():
    data = load_data(options(["--data", "mine:conjugate", "--workers", "0"]), CPU, print)
    ((ours, _),), ((theirs, _),) = (split.batches([torch.tensor([7])], 0) for split in (data.train, data.test))
    assert torch.equal(ours, theirs)
    assert not ours.is_conj()
    assert all("digest" in split.fingerprint() for split in (data.train, data.test))


@pytest.mark.parametrize(
    ("name", "labels", "said"),
    [
        # -100, a label that does not count, is a valid one.
        ("class_3", [-100, -100], "target 3 is not in 0 to 2; fix it, then add --resume auto"),
        # Samples of different shapes make no batch: the one rank that read them would end with a traceback.
        ("longer", [0, 1], "is float32 of shape (3,) and int64 of shape (), 'train'[0] float32 of shape (2,) and int64 of shape (); make all samples alike, then add --resume auto"),
    ],
)  # fmt: skip
def test_a_sample_unlike_the_others_is_reported_and_replaced(name, labels, said):
    inputs, found, error = read_bad_sample(f"{name}_at_7", 7, 4)
    assert (inputs.shape, found) == ((2, 2), labels)
    assert re.fullmatch(rf"--data mine:{name}_at_7: 'train'\[7\]:? {re.escape(said)}", error)


def test_ctrl_c_ends_a_rank_that_reads_the_samples_itself():
    with pytest.raises(KeyboardInterrupt):
        read_bad_sample("interrupts_at_7", 7, 3)


def test_the_number_of_samples_stays_what_it_was():
    data, _ = load("--data", "mine:grows", "--model", "mine:net")
    assert len({len(data.train) for _ in range(3)}) == 1


def test_samples_of_lists_and_numbers_become_tensors():
    data = load_data(options(["--data", "mine:lists", "--task", "mine:Fit", "--workers", "0"]), CPU, print)
    ((inputs, targets),) = data.train.batches([torch.tensor([7, 4])], 0)
    assert torch.equal(inputs, torch.tensor([[1.0, 7.0], [1.0, 4.0]]))
    assert torch.equal(targets, torch.tensor([3.5, 2.0]))


def test_a_pair_of_arrays_becomes_tensors_on_the_device():
    data, _ = load("--data", "mine:arrays", "--model", "mine:net")
    for split in (data.train, data.test):
        ((inputs, targets),) = split.batches([torch.tensor([7, 4])], 0)
        assert torch.equal(inputs, torch.linspace(-1, 1, 24).view(12, 2)[[7, 4]])
        assert targets.tolist() == [1, 1]


def test_an_operation_that_the_option_forbids_is_named_with_it():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UserError) as caught:
            user_code.call_user_code("--model mine:net", torch.zeros(1).put_, torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
    fix = "put_ has no deterministic implementation on this device; use another, or drop --deterministic"
    assert str(caught.value) == f"--model mine:net failed: {fix}"


def test_a_sample_that_cannot_be_made_is_a_warning_since_the_run_is_complete():
    class Mute:
        def sample(self, model, device):
            raise RuntimeError("no words")

    peers, model = Peers(CPU), nn.Linear(1, 1)
    said = make_sample(Mute(), model, peers, exchanges=False, timeout_s=1.0)
    assert re.fullmatch(
        r"warning: the sample failed: RuntimeError: no words \(\S+, line \d+\); the run is complete without it",
        said,
    )
    with pytest.raises(RuntimeError, match="no words"):  # other ranks may wait for this one
        make_sample(Mute(), model, peers, exchanges=True, timeout_s=1.0)


def optimizer_of(name, *argv):
    args = options([*WELL, "--optimizer", f"mine:{name}", "--lr", "0.5", *argv])
    return args, build_optimizer(args, load(*WELL)[1], Peers(CPU))


def test_an_own_optimizer_keeps_its_groups_and_their_shares_of_the_rate():
    _, optimizer = optimizer_of("bias_first")
    assert type(optimizer) is torch.optim.AdamW
    set_learning_rate(optimizer, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1 / 4, 0.1]
    for number, group in enumerate(optimizer.param_groups):
        group["own"] = number
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    content = copy.deepcopy(optimizer_state(optimizer))
    assert [group["params"] for group in content["param_groups"]] == [[1], [0]], "the model's order: weight, bias"
    _, again = optimizer_of("bias_first", "--lr", "0.25", "--weight-decay", "0.75")
    load_optimizer_state(again, content)
    assert [group["weight_decay"] for group in again.param_groups] == [0.75, 0.0], "an option, as the rate"
    assert [group["own"] for group in again.param_groups] == [0, 1]
    for one, other in zip(optimizer.param_groups, again.param_groups, strict=True):
        (before,), (now,) = one["params"], other["params"]
        assert torch.equal(optimizer.state[before]["exp_avg"], again.state[now]["exp_avg"])
    set_learning_rate(again, 0.1)
    assert [group["lr"] for group in again.param_groups] == [0.1 / 4, 0.1]
    content["param_groups"].reverse()
    with pytest.raises(ValueError, match="other groups of parameters"):
        load_optimizer_state(again, content)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "--optimizer mine:nothing returned None; return a torch.optim.Optimizer"),
        ("reads", "--optimizer mine:reads failed: "),
        ("needs_closure", "--optimizer mine:needs_closure: step() of a LBFGS needs a closure; use one that steps"),
        (
            "weight_only",
            "--optimizer mine:weight_only: it leaves out bias; add it to a group, or set its requires_",
        ),
        ("a_copy", "it has a parameter that is not the model's; give it those it is called with"),
        ("no_rate", "a group of its parameters has no lr, which the schedule sets; give it one"),
        ("Noisy", "--optimizer mine:Noisy failed: TypeError: Noisy() takes no arguments"),
        ("bias_frst", "bias_frst does not exist in {folder}/mine.py; did you mean 'bias_first'?"),
    ],
)
def test_an_own_optimizer_that_does_not_fit_is_one_line(tmp_path, name, message):
    with refused(message.format(folder=tmp_path)):
        optimizer_of(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "keeps_function",
            "no checkpoint gives back now of a parameter's state, a builtin_function_or_method; let it",
        ),
        (
            "keeps_more",
            "it has the state 'all', which is not a parameter; keep what is not of one parameter in the gr",
        ),
        ("bias_first", ""),
    ],
)
def test_what_a_checkpoint_cannot_restore_of_an_own_optimizer_is_refused(name, message):
    args, optimizer = optimizer_of(name)
    optimizer.step()
    with refused(message) if message else contextlib.nullcontext():
        user_code.check_optimizer_state(args, optimizer)


@pytest.mark.parametrize(
    ("recipe", "argv", "message"),
    [
        ("ddp", ("--zero",), "--zero is for sgd and adamw; drop it, or --optimizer mine:bias_first"),
        ("ddp", ("--no-decay-norm-bias",), "--no-decay-norm-bias is for sgd and adamw; drop it, and set each"),
        ("ddp", ("--momentum", "0.5"), "--momentum 0.5 is for sgd; drop it, or use --optimizer sgd"),
    ],
)
def test_options_that_an_own_optimizer_does_not_combine_with(recipe, argv, message):
    module = importlib.import_module(f"recipes.{recipe}.train")
    with refused(message):
        module.options([*WELL, "--optimizer", "mine:bias_first", *argv]).check()


WELL = ("--data", "mine:classes", "--model", "mine:net")
FIT = ("--data", "mine:data", "--model", "mine:net", "--task")


DOES_NOT_FIT = [
    (("--model", "mien:net"), "--model mien:net: there is no module 'mien'; put mien.py into "),
    (("--model", "mine.sub:net"), "there is no module 'mine.sub'"),
    (("--model", "mine.py:net"), "there is no module 'mine.py'; name the module without .py: --model mine:net"),
    (("--model", "mine:nett"), "nett does not exist in {folder}/mine.py; did you mean 'net'?"),
    (("--model", "time:nett"), "--model time:nett: nett does not exist in time"),
    (("--model", "mine:NUMBER"), "NUMBER is not a function or class in {folder}/mine.py"),
    (("--model", "broken:net"), "importing broken failed: NameError: name 'undefined' is not defined ({folder}/broken.py, line 2); fix it"),
    (("--model", "syntax:net"), "importing syntax failed: SyntaxError: invalid syntax (syntax.py, line 1) ({folder}/syntax.py, line 1)"),
    (("--model", "needs:net"), "importing needs failed: ModuleNotFoundError: No module named 'not_installed' ({folder}/needs.py, line 1)"),
    (("--model", "exits:net"), "--model exits:net: importing exits failed: SystemExit: 0 ({folder}/exits.py, line 2); fix it"),
    (("--model", "mine:fails"), "--model mine:fails failed: ZeroDivisionError: division by zero ({folder}/mine.py, line "),
    (("--model", "mine:panics"), "--model mine:panics failed: Panic: no GPU ({folder}/mine.py, line "),
    (("--model", "panics:net"), "importing panics failed: BaseException: at once ({folder}/panics.py, line 1); fix it"),
    (("--model", "meta:net"), "--model meta:net: importing meta sets torch's default device to meta; leave torch.set_default_device() out, "),
    (("--model", "gpu:net"), "--model gpu:net: importing gpu sets torch's default device to one that is not there; leave torch.set"),
    (("--model", "mine:on_default"), "--model mine:on_default sets torch's default device to meta; leave torch.set_default_device() out, the"),
    (("--model", "moves:net"), "--model moves:net: importing moves leaves {folder}, where paths of options begin, for /; leave os.chdir() out"),
    (("--model", "mine:reads"), "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) ({folder}/mine.py,"),
    (("--data", "mine:class_3"), "--data mine:class_3: 'train': target 3 is not in 0 to 2; fix it, or \"num_classes\""),
    (("--data", "mine:unlabelled"), "--data mine:unlabelled: 'train': all targets are -100, so none is counted; give"),
    (("--data", "mine:ascii"), '--data mine:ascii: bytes have 256 values; set "num_classes" to 256, or "target" to "tokens"'),
    (("--data", "mine:token_9"), "--data mine:token_9: 'train': input 9 is not in 0 to 8; fix it"),
    (("--data", "mine:token_skipped"), "mine:token_skipped: 'train': input -100 is not in 0 to 8; fix it"),
    (("--data", "mine:tokens_unlabelled"), "mine:tokens_unlabelled: 'train': all targets are -100, so none is counted;"),
    (("--model", "mine:one_for_all"), "--model mine:one_for_all returned the same model twice; let it make a new one in each call"),
    (("--model", "mine:nothing"), "--model mine:nothing returned None; return a torch.nn.Module"),
    (("--model", "mine:wrong_shape"), "--model mine:wrong_shape returned a tensor of shape (128,) for 2 samples; return a tensor with a row for each"),
    ((*WELL, "--model", "mine:few_classes"), "--model mine:few_classes returns 2 logits, and --data mine:classes has 3 classes; return one for each"),
    ((*WELL, "--model", "lenet"), "--model lenet takes images, and --data mine:classes has float32 of shape (2,); give your own"),
    ((*FIT, "mine:Fit", "--model", "mine:Untrue"), "--model mine:Untrue: its children one after another do not return what it does; remove is_sequence"),
    (("--data", "mine:data"), "--data mine:data: no built-in task takes values; add --task package.module:Class"),
    ((*FIT, "classification"), "--task classification does not fit --data mine:data, whose targets are values"),
    (("--data", "mine:classes", "--model", "mine:Tokens", "--batchnorm-group", "2"), "--batchnorm-group 2: batch norm of --model mine:Tokens gets 4 rows for 2 samples; give it a row per sample"),
    ((*FIT, "mine:Mean"), '; return the sum over the samples (reduction="sum"), not the mean'),
    ((*WELL, "--task", "mine:Share"), "--task Share on outputs (2, 3) and targets (2,): metric_sums()'s correct of two samples is 0.5, the sum of"),
    ((*WELL, "--task", "mine:Sure"), "metric_sums()'s correct of two samples is 1, the sum of each one's 2; return the sum over the samples"),  # 0 for the untrained model
    ((*WELL, "--task", "mine:Pairs"), "the sum of each one's 0; return a sum of one value for each sample, and let derive() compute what is not a sum"),
    ((*FIT, "mine:Largest"), "metric_sums()'s absolute_error of two samples is "),
    ((*FIT, "mine:TwoLosses"), "mine:TwoLosses: two values have the name 'loss'; rename one of metrics"),
    ((*WELL, "--task", "mine:Trained"), "--task mine:Trained: it has parameters, and only the model's are trained; move them into the model, or set"),
    (("--data", "mine:classes", "--model", "mine:LeavesOut"), "mine:LeavesOut: its state_dict() leaves out weight, and a checkpoint has to give back all parameters; return"),
    (("--data", "mine:classes", "--model", "mine:NeverSet"), "load_state_dict() of its own state_dict() failed: RuntimeError: Error(s) in loading state_dict for NeverSet: "),
    (("--data", "mine:classes", "--model", "mine:on_meta"), "--model mine:on_meta: 0.weight is on the meta device; return a model with its weights"),
    (("--data", "mine:classes", "--model", "mine:Sparse"), "the buffer graph of a Sparse is sparse, and ranks exchange dense ones; keep its indices and values in two"),
    (("--data", "mine:empty"), "mine:empty: 'test' is empty; give at least one sample"),
    (("--data", "mine:classes", "--model", "mine:Named"), "takes 1 positional argument but 2 were given; fix it and start again"),
    ((*FIT, "mine:NoGradient"), "loss_sum() has to return a scalar tensor that gradients come from"),
    ((*FIT, "mine:TooFew"), "metric_sums() returned a tuple that does not fit; return a tuple, a value for each"),
    ((*FIT, "mine:ChangesOutput"), "--task ChangesOutput on outputs (2, 1) and targets (2,): it changes output or target in place; let it change a copy"),
    ((*WELL, "--task", "mine:ChangesTarget"), "it changes output or target in place; let it change a copy"),
    ((*FIT, "mine:NoCount"), "count() failed: IndexError: Dimension out of range (expected to be in range of [-1, 0], but got 1) ({folder}/mine.py, line "),
    ((*FIT, "mine:CountsEach"), "count() failed: "),
    ((*FIT, "mine:CountsShare"), "count() of two samples is 1, the sum of each one's 2; return the sum over the samples"),
    ((*FIT, "mine:NoTuple"), "metric_sums() returned a Tensor that does not fit; return a tuple, a value for each"),
    (("--data", "mine:classes", "--model", "mine:KeepsObject"), "--model mine:KeepsObject: no checkpoint gives back _extra_state, a Generator; let get_extra_state() return"),
    ((*FIT, "mine:NoNumber"), "--task NoNumber: derive() returned a list as 'rms_error'; return a number"),
    ((*FIT, "mine:NoDict"), "--task NoDict: derive() returned a float; return a dict of numbers"),
    ((*FIT, "mine:NoHeadline"), "nothing has the headline's name 'rms'; set it to one of loss, absolute_error, rms_error, or let derive()"),
    ((*FIT, "mine:NoSuchMean"), "--task NoSuchMean: derive() failed: KeyError: 'los' ({folder}/mine.py, line "),
    ((*FIT, "mine:NoTask"), "--task mine:NoTask makes a NoTask; give a subclass of recipes.common.task.Task"),
    (("--data", "mine:nothing"), "--data mine:nothing returned None without 'train'; return {{"),
    (("--data", "mine:no_target"), "returned a dict without 'target'; return {{"),
    (("--data", "mine:unknown_target"), "unknown target 'clas'; did you mean 'class'?"),
    (("--data", "mine:no_number"), '"num_classes" is None; give the number of classes or different tokens'),
    (("--data", "mine:float_class"), "a target is float32 of shape (); of kind 'class' it has to be int64 of shape (); convert it, or use 'values' and a --task of your own"),
    (("--data", "mine:unlike"), "a sample of 'train' is float32 of shape (2,) and int64 of shape (), one of 'test' float32 of shape (1,)"),
    (("--data", "mine:uneven"), "'train' has 12 inputs and 11 targets; give as many of each"),
    (("--data", "mine:no_pairs"), "'train'[0] is a int; each sample has to be a pair (input, target)"),
    (("--data", "mine:words"), "'train'[0] is a pair of a str and a int; return tensors, arrays or numbers"),
    (("--data", "mine:big_endian"), "return tensors, arrays or numbers (given numpy array has byte order different"),
    (("--data", "mine:sparse"), "'train' failed: TypeError: a tensor is sparse, nested or on the meta device"),
    (("--data", "mine:sparse_samples"), "'test'[0] is a pair of a Tensor and a int; return tensors, arrays or num"),
    (("--data", "mine:scalars"), "'train' has 0 inputs and 0 targets; give as many of each"),
    (("--data", "mine:no_length"), "'train': len() failed: AttributeError: 'NoLength' object has no attribute 'files' ({folder}/mine.py, line"),
    (("--data", "mine:not_finite", "--model", "mine:net", "--task", "mine:Fit"), "the loss of two samples is nan; look for values that are not finite in --data"),
    (("--data", "mine:no_sequence"), "'train' is a list_iterator; give two tensors or arrays, or an object with len() and [i]"),
    (("--data", "mine:stream"), "'train' is a stream without [i] (a Stream); give a map-style data set (for Parquet: read"),
    (("--data", "mine:stream_of_twelve"), "'train' is a stream without [i] (a StreamOfTwelve); give a map-style"),
    (("--data", "mine:none"), "'train' is empty; give at least one sample"),
    (("--data", "mine"), "invalid choice 'mine'"),
    (("--task", "mine."), "invalid choice 'mine.'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"), DOES_NOT_FIT, ids=lambda value: value[-1] if isinstance(value, tuple) else ""
)
def test_what_does_not_fit_is_one_line_with_the_fix(tmp_path, argv, message):
    with refused(message.format(folder=tmp_path)):
        load(*argv)


@pytest.mark.parametrize(("name", "mixes"), [("net", False), ("Drops", True), ("Draws", False)])
def test_samples_that_equal_ones_before_them_change_are_seen(name, mixes):
    """Such as those that come after an expert has as many as it takes; random numbers are warned of otherwise."""
    assert load("--data", "mine:classes", "--model", f"mine:{name}")[1].mixes_samples is mixes


@pytest.mark.parametrize(
    ("name", "more", "warns"),
    [
        ("half", (), True),
        ("half", ("--optimizer", "mine:bias_first"), False),
        ("half_frozen", (), False),
        ("net", (), False),
    ],
)
def test_16_bit_weights_that_a_built_in_optimizer_updates_are_warned_of(name, more, warns):
    args = options(["--data", "mine:classes", "--model", f"mine:{name}", *more])
    model = build_user_model(args, load_data(args, CPU, print))
    fix = "build the model in float32 (dtype=torch.float32); with mixed precision, it still computes in 16 bits"
    warning = f"warning: weight is trained in bfloat16, which loses small updates; {fix}"
    assert half_weights(SimpleNamespace(args=args, model=model)) == (warning if warns else "")


def test_a_model_that_changes_its_inputs_in_place_is_checked_on_the_same_inputs():
    """It is a sequence of layers, and whether it mixes samples can be seen. A pipeline refuses it."""
    for name, mixes in (("in_place", False), ("centres_in_place", True)):
        argv = ("--data", "mine:classes", "--model", f"mine:{name}")
        data, model = load(*argv)
        assert model.mixes_samples is mixes
        with refused(f"--model mine:{name}: it changes its input in place, and the microbatches of a step share"):
            check_input(model, options(argv), data)


def test_a_model_of_your_own_keeps_its_layout_unless_channels_last_is_given():
    for name in ("mine:Views", "mine:ViewsGradient"):
        argv = ("--data", "mine:images", "--model", name)
        assert load(*argv)[1].two.weight.is_contiguous()
        assert not options(argv).channels_last
        with pytest.raises(UserError) as caught:
            load(*argv, "--channels-last")
        assert re.fullmatch(
            rf"--channels-last: --model {name} fails in this layout: RuntimeError: view size is not .* \(\S+, line "
            r"\d+\); use reshape\(\) in place of view\(\), or drop --channels-last",
            str(caught.value),
        )
    _, model = load("--data", "mine:volumes", "--model", "mine:conv3d", "--channels-last")
    assert model[0].weight.is_contiguous()


class Moves(nn.Linear):
    """Notes where it is moved."""

    place = "cpu"

    def to(self, device):
        self.place = device.type

    def cpu(self):
        self.place = "cpu"


def test_a_model_that_does_not_run_on_the_cpu_is_checked_on_its_device():
    def check(model, args, data):
        places.append(model.place)
        if model.place != needs:
            raise UserError(f"does not run on {model.place}")

    for device, needs, expected in (
        ("cpu", "cpu", ["cpu"]),
        ("cuda", "cpu", ["cpu"]),
        ("cuda", "cuda", ["cpu", "cuda"]),
        ("cpu", "cuda", ["cpu"]),
        ("cuda", "tpu", ["cpu", "cuda"]),
    ):
        places, model = [], Moves(1, 1)
        if needs == expected[-1]:
            check_on(torch.device(device), check, model, options([]), None)
            assert model.place == "cpu"
        else:
            with pytest.raises(UserError, match=f"does not run on {device}"):
                check_on(torch.device(device), check, model, options([]), None)
        assert places == expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_exchange_which_parameters_a_step_used_without_waiting_for_a_gpu(world_size):
    """A tensor on the GPU would wait in each step until backward is done; no rank alone has to exchange any."""
    model, peers, sent = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Peers(torch.device("meta")), []
    model[0](torch.ones(1, 2)).sum().backward()
    peers.world_size, peers.sum_tensor = world_size, sent.append
    unused = find_unused(model, options(["--model", "mine:net", "--data", "mine:data"]), peers)
    assert [id(parameter) for parameter in unused] == [id(parameter) for parameter in model[1].parameters()]
    assert [(tensor.device.type, tensor.tolist()) for tensor in sent] == [("cpu", [1, 1, 0, 0])] * (world_size - 1)


def test_two_samples_prove_nothing_against_a_quotient():
    data, _ = load(*FIT, "mine:Undefined")
    with pytest.raises(UserError, match=r"derive\(\) failed: ZeroDivisionError"):
        user_code.add_derived({"loss": 1.0, "absolute_error": 1.0}, data.task)


def test_what_a_model_keeps_beside_tensors_and_a_checkpoint_gives_back_is_taken():
    _, model = load("--data", "mine:classes", "--model", "mine:KeepsNumbers")
    assert model.get_extra_state()["a"] == [1, 2.5]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5, 4), (2, 5, 4, 3)])
def test_an_output_that_predicts_the_targets_has_its_largest_logit_there(shape):
    """Classes are in the second dimension, as in a segmentation, or in the last one, as in a text."""
    targets = torch.randint(3, [size for size in shape if size != 3])
    output = exact_output(torch.zeros(shape), targets)
    assert output.shape == shape
    assert torch.equal(output.argmax(shape.index(3)), targets)
    assert torch.equal(exact_output(torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.int64)), torch.ones(2, 4))


def test_a_task_is_tried_on_the_device_of_the_training():
    """A GPU's first step would fail with weights that the task keeps on the CPU; so does the meta device."""
    data, model = load(*WELL, "--task", "mine:Weighted")
    with refused("--task Weighted on outputs (2, 3) and targets (2,) failed: RuntimeError: "):
        check_fit(model, options([*WELL]), data, torch.device("meta"))


@pytest.mark.parametrize("task", ["Count", "Frozen"])
def test_sums_of_a_task_and_its_frozen_parts_are_taken(task):
    data, _ = load(*WELL, "--task", f"mine:{task}")
    assert type(data.task).__name__ == task


def test_lazy_layers_have_their_parameters_before_the_training():
    _, model = load("--data", "mine:classes", "--model", "mine:lazy")
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        **{"0.weight": (4, 2), "0.bias": (4,), "2.weight": (3, 4), "2.bias": (3,)},
        **dict.fromkeys(("1.weight", "1.bias", "1.running_mean", "1.running_var"), (4,)),
        "1.num_batches_tracked": (),
    }


SGD = ("--weight-decay", "0")


@pytest.mark.parametrize(
    ("recipe", "argv", "is_taken"),
    [
        ("single", SGD, True),
        ("single", (), False),
        ("single", (*SGD, "--optimizer", "adamw"), False),
        ("ddp", (*SGD, "--zero", "--clip-grad-norm", "1"), True),
        ("ddp", (*SGD, "--grad-compression", "fp16"), False),
        ("horovod", (*SGD, "--compression", "none"), True),
        ("horovod", SGD, False),
        *((recipe, SGD, False) for recipe in ("scratch", "fsdp", "tensor")),
    ],
)
def test_sparse_gradients_are_refused_where_nothing_takes_them(recipe, argv, is_taken):
    args = importlib.import_module(f"recipes.{recipe}.train").options(["--model", "mine:net", *argv])
    model = nn.Sequential(nn.Embedding(9, 2), nn.EmbeddingBag(9, 2, mode="sum", sparse=True))
    refusal = r"^--model mine:net: 1 has sparse gradients, .*; make it without sparse=True; "
    with contextlib.nullcontext() if is_taken else pytest.raises(UserError, match=refusal):
        check_sparse(model, args)
    check_sparse(model[:1], args)
    check_sparse(model.requires_grad_(False), args)


def test_what_is_built_into_python_has_no_digest():
    assert user_code.digests(options(["--model", "time:sleep"])) == {"time": "no file"}


def test_batch_norm_whose_rows_are_samples_takes_groups():
    for argv in (("mine:Norm", "--batchnorm-group", "2"), ("mine:Tokens",)):
        _, model = load("--data", "mine:classes", "--model", *argv)
        assert not model.norm._forward_pre_hooks


def test_a_change_of_the_code_changes_its_digest(tmp_path):
    args = options([*WELL])
    before = user_code.digests(args)
    assert list(before) == ["mine"]
    (tmp_path / "mine.py").write_text(MODULE + "\n")
    assert user_code.digests(args) != before


def test_what_your_module_imports_is_compared_between_ranks(tmp_path, monkeypatch):
    """Your own files by their content, libraries by their version; a rank may import more than another one."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    library = tmp_path / "site-packages" / "timmy"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("from timmy import layers\n__version__ = '1.2'\n")
    (library / "layers.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    (tmp_path / "helpers.py").write_text("import timmy, colorsys\n")
    (tmp_path / "theirs.py").write_text("import helpers\nfrom mine import net\n")
    args = options(["--model", "theirs:net", "--data", "mine:data"])
    facts = user_code.digests(args)
    assert facts.pop("import timmy") == "version 1.2"
    assert set(facts) == {"theirs", "mine", "import helpers"}
    assert all(re.fullmatch("code with digest [0-9a-f]{8}", text) for text in facts.values())
    agreement.check_facts(facts, {**facts, "import timmy": "version 1.2"})
    with pytest.raises(UserError, match=r"^import timmy is version 1\.2 on .*, and version 1\.3 on rank 0; start"):
        agreement.check_facts({"import timmy": "version 1.2"}, {"import timmy": "version 1.3"})
