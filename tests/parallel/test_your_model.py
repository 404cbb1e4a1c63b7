"""docs/your-model.md: the module that it shows, in several recipes, on one curve; and text, the second task."""

import functools
import json
import math
import re
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from recipes.common.data import load_data
from recipes.common.errors import UserError
from recipes.common.models.models import build_model
from recipes.common.parallel import buckets
from recipes.single.train import options
from tests.conftest import slow
from tests.support import (
    ROOT,
    assert_same_run,
    is_equal,
    largest_difference,
    local,
    losses,
    metrics,
    newest_checkpoint,
    start_run,
    train,
    weights,
    words_for,
)

MINE, SUMS, SPLIT, DIVIDED, OWN_TASK, OWN_OPTIMIZER = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/your-model.md").read_text(), re.DOTALL
)
SAME = {
    **{"ddp": (), "horovod": ("--compression", "none"), "pipeline": ("--num-microbatches", "2")},
    "apex": ("--opt-level", "O0"),
}


def import_from(folder):
    """Make a rank import modules from a folder, as if it had started there."""
    sys.path.insert(0, str(folder))


BREAKS = """
import os, random, time

import numpy as np

from recipes.common.task import Classification

class TwoToThree(nn.Linear):
    def __init__(self, data):
        super().__init__(2, 3)

def values():
    x, y = spirals()["train"]
    pair = x, x.prod(1, keepdim=True)
    return {"train": pair, "test": pair, "target": "values"}

class Breaks:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if os.environ.get("RANK") == "1" and str(index) in os.environ.get("BREAK", "").split(","):
            raise ValueError(f"sample {index} is broken")
        return torch.full((2,), index / 64), index % 3

class Unlabelled(Breaks):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], -100 if index < int(os.environ["LABELLED"]) else 1

class BrokenMetric(SquaredError):
    def metric_sums(self, output, target):
        if len(output) > 2 and os.environ.get("BREAK") == "task":
            raise ValueError("too many samples for this metric")
        self.evaluates = len(output) > 2
        return super().metric_sums(output, target)
    def derive(self, averages):
        if os.environ.get("BREAK") == "derive" and os.environ["RANK"] == "1" and self.evaluates:
            raise ValueError("too many samples for this metric")
        return super().derive(averages)

class BrokenModel(nn.Sequential):
    is_sequence = True
    def forward(self, inputs):
        if len(inputs) > 2 and not self.training and os.environ.get("BREAK") == "model":
            raise ValueError("too many samples for this model")
        return super().forward(inputs)

class SlowSample(Classification):
    def sample(self, model, device):
        for _ in range(4):
            time.sleep(3)
            model(torch.zeros(1, 2))
        return "a slow sample"

class Slowing(torch.optim.SGD):
    "Its rate falls with the number of steps, which it keeps in its groups. All parameters have a state at once."
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, momentum=0.9)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] /= group["steps"]
        return super().step(closure)

class Timed(Slowing):
    def step(self, closure=None):
        self.param_groups[0]["clock"] = time.time
        return super().step(closure)

class Lars(torch.optim.Optimizer):
    "Divides a parameter's norm by its gradient's, as LARS does: both are of the whole parameter."
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["sum"] = self.new_state(parameter)
                state["sum"].mul_(0.9).add_(gradient * ((parameter.norm() + 0.1) / (gradient.norm() + 0.1)))
                parameter.sub_(state["sum"], alpha=group["lr"])
    def new_state(self, parameter):
        return torch.zeros_like(parameter)

class OwnRows(Lars):
    def new_state(self, parameter):
        return torch.zeros(parameter.shape)

class Counts(Lars):
    def new_state(self, parameter):
        self.state[parameter]["by_row"] = parameter.new_zeros(len(parameter))
        return torch.zeros_like(parameter)

class WholeNorm(Lars):
    def step(self, closure=None):
        super().step(closure)
        group = self.param_groups[0]
        group["norm"] = sum(parameter.norm() for parameter in group["params"])

class Scaled(torch.optim.SGD):
    def __init__(self, params, lr=0.1, scale=1.0):
        super().__init__(params, lr)
        self.scale = scale

class LateRows(Lars):
    "From its third step on, it keeps what no checkpoint gives back to shards."
    def step(self, closure=None):
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        for parameter in self.param_groups[0]["params"] if self.steps == 3 else ():
            self.state[parameter]["by_row"] = parameter.new_zeros(len(parameter))

class LateTimed(LateRows):
    def step(self, closure=None):
        super().step(closure)
        if self.steps == 3:
            self.param_groups[0]["clock"] = time.time

class Scaling(torch.optim.SGD):
    "Scales its rate by the norm of all gradients, as D-adaptation does."
    def step(self, closure=None):
        group = self.param_groups[0]
        group["norm"] = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        group["lr"] *= group["norm"]
        return super().step(closure)

class ByAttribute(torch.optim.SGD):
    "Scales the gradients of the parameters that have an attribute."
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad *= getattr(parameter, "scale", 1.0)
        return super().step(closure)

class Shaking(torch.optim.SGD):
    "Adds noise to the weights, as stochastic rounding does."
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter += 0.01 * torch.randn_like(parameter) + 0.01 * random.random()

class Steady(Classification):
    pass

class Shaken(Classification):
    "Adds noise to what the model returns."
    def loss_sum(self, output, target):
        noise = torch.randn_like(output) if output.grad_fn and len(output) > 2 else 0
        return super().loss_sum(output + noise, target)

def step_hook(named_parameters, lr, weight_decay):
    optimizer = torch.optim.SGD([p for _, p in named_parameters], lr)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer

shaking = lambda named_parameters, lr, weight_decay: Shaking([p for _, p in named_parameters], lr)
scaling = lambda named_parameters, lr, weight_decay: Scaling([p for _, p in named_parameters], lr)
by_attribute = lambda named_parameters, lr, weight_decay: ByAttribute([p for _, p in named_parameters], lr)
late_rows = lambda named_parameters, lr, weight_decay: LateRows([p for _, p in named_parameters], lr)
late_timed = lambda named_parameters, lr, weight_decay: LateTimed([p for _, p in named_parameters], lr)
scaled = lambda named_parameters, lr, weight_decay: Scaled([p for _, p in named_parameters], lr, scale=20.0)
timed = lambda named_parameters, lr, weight_decay: Timed([p for _, p in named_parameters], lr)
fails_on_rank_1 = lambda *args: {"0": slowing}[os.environ["RANK"]](*args)
lars = lambda named_parameters, lr, weight_decay: Lars([
    {"params": [p], "lr": lr / (1 + number % 2)} for number, (_, p) in enumerate(named_parameters)])
own_rows = lambda named_parameters, lr, weight_decay: OwnRows([p for _, p in named_parameters], lr)
counts = lambda named_parameters, lr, weight_decay: Counts([p for _, p in named_parameters], lr)
whole_norm = lambda named_parameters, lr, weight_decay: WholeNorm([p for _, p in named_parameters], lr)
slowing = lambda named_parameters, lr, weight_decay: Slowing([p for _, p in named_parameters], lr)

class Branches(nn.Module):
    "From step FROM, the first half of a batch (rank 0 of two) goes through one layer, the other half not."
    def __init__(self, data):
        super().__init__()
        self.seldom, self.other, self.head, self.step = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3), 0
    def forward(self, x):
        size, rank = len(x), os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") == "2" else None
        self.step += self.training
        first = {"0": size, "1": 0, None: size // 2}[rank]
        if not self.training or self.step < int(os.environ.get("FROM", 1)):
            return self.head(self.seldom(x) + self.other(x))
        parts = [self.seldom(x[:first])] * (first > 0) + [self.other(x[first:])] * (first < size)
        return self.head(torch.cat(parts))

class Thaws(nn.Linear):
    "Its layer is frozen up to the third step, or from it on."
    def __init__(self, thaws=True):
        super().__init__(8, 8)
        self.requires_grad_(not thaws)
        self.step, self.thaws = 0, thaws
    def forward(self, x):
        self.step += self.training
        if self.step == 3:
            self.requires_grad_(self.thaws)
        return super().forward(x)

class Turns(nn.Module):
    "In each step another layer is used, by the first half of a batch alone (rank 0 of two)."
    def __init__(self, data):
        super().__init__()
        self.layers, self.head, self.step = nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), nn.Linear(2, 3), 0
    def forward(self, x):
        rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") == "2" else None
        first = {"0": len(x), "1": 0, None: len(x) // 2}[rank] if self.training else len(x)
        layer = self.layers[self.step % 3]
        self.step += self.training
        return self.head(torch.cat([layer(x[:first])] * (first > 0) + [x[first:]]))

class Experts(nn.Module):
    # With two ranks, rank 1 runs, from step FROM, another expert than rank 0, none, or all in another order: in
    # training, or if EVALUATES is set, in evaluations.
    def __init__(self, data):
        super().__init__()
        self.step = 0
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, n), nn.Linear(n, 3)) for n in (4, 8))
    def forward(self, inputs):
        first, second = self.experts
        self.step += self.training
        is_other = os.environ.get("RANK") == "1" and self.step >= int(os.environ.get("FROM", 1))
        is_other = is_other and self.training == (not os.environ.get("EVALUATES"))
        case = os.environ.get("CASE") if is_other else ""
        order = {"other": [second], "none": [], "order": [second, first]}.get(case, [first])
        if os.environ.get("CASE") == "order" and not case:
            order = [first, second]
        return sum(expert(inputs) for expert in order) + inputs.new_zeros(len(inputs), 3, requires_grad=True)

def drawn_by_rank(data):
    if os.environ.get("RANK") == "1":
        torch.manual_seed(1)
    return net(data)

def copied_by_rank(data):
    model = net(data)
    if os.environ.get("RANK") == "0":
        model[0].weight.data.copy_(torch.ones(64, 2))  # as load_state_dict() does
    return model

class ReadByRank0(nn.Module):
    "Divides by statistics that only rank 0 has read."
    def __init__(self):
        super().__init__()
        self.register_buffer("std", torch.tensor(2.0 if os.environ.get("RANK") == "0" else 1.0))
    def forward(self, inputs):
        return inputs / self.std

def wider_by_rank(data):
    units = 8 + int(os.environ.get("RANK") == "1")
    return nn.Sequential(nn.Linear(2, units), nn.Linear(units, 3))

def normalised_by_rank(data):
    return nn.Sequential(nn.Linear(2, 8), ReadByRank0(), nn.Linear(8, 3))

class Buffered(nn.Linear):
    "A training pass fills its buffers with 1 on rank 0 and 2 on rank 1; an evaluation needs rank 0's."
    def __init__(self):
        super().__init__(2, 3)
        for dtype in (torch.int16, torch.float8_e4m3fn):
            self.register_buffer(str(dtype)[6:], torch.ones(2, 2).to(dtype))
    def forward(self, inputs):
        for buffer in self.buffers():
            if self.training:
                buffer.fill_(1 + int(os.environ.get("RANK", "0")))
            assert self.training or buffer.float().eq(1).all()
        return super().forward(inputs)

class Detached(TwoToThree):
    def forward(self, inputs):
        return inputs.new_zeros(len(inputs), 3, requires_grad=True)

class Mixed(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 3, dtype=torch.bfloat16)
    def forward(self, inputs):
        return self.second(self.first(inputs).bfloat16())

class Noisy(TwoToThree):
    def forward(self, inputs):
        return super().forward(nn.functional.dropout(inputs, 0.5, self.training))

class Narrow(TwoToThree):
    def forward(self, inputs):
        return super().forward(inputs.bfloat16()).float()

class Normed(nn.Embedding):
    def forward(self, inputs):
        return super().forward((inputs > 0).long())

class RunningMean(nn.Linear):
    def __init__(self, data):
        super().__init__(2, 3)
        self.register_buffer("mean", torch.zeros(2))
    def forward(self, inputs):
        if self.training:
            self.mean += (inputs.mean(0) - self.mean) / 10
        return super().forward(inputs - self.mean)

class Centred(TwoToThree):
    def forward(self, inputs):
        return super().forward(inputs - inputs.mean(0))

class Odd(nn.Linear):
    "What a probe of two equal samples may meet: none of it depends on the number of processes."
    def __init__(self, data):
        super().__init__(2, 3)
        self.calls = 0
    def forward(self, inputs):
        output, case = super().forward(inputs), os.environ["ODD"]
        self.calls += 1
        if self.training:
            return output
        if case == "rejects equal samples" and len(inputs) > 1 and inputs[0].equal(inputs[1]):
            raise ValueError("equal samples")
        if case == "width":
            return nn.functional.pad(output, (0, len(inputs.unique(dim=0))))
        if case == "bool":
            return output > 0
        return output + {"noise": random.random(), "counts": self.calls % 2}.get(case, 0)

class Borrows(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3)])
    def forward(self, inputs):
        return nn.functional.linear(inputs, self.layers[0].weight, self.layers[0].bias)

class AddTo(nn.Linear):
    def forward(self, inputs):
        inputs += super().forward(inputs)
        return inputs

def add_to(data):
    return nn.Sequential(nn.Linear(2, 8), AddTo(8, 8), nn.Linear(8, 3))

class RefusesZeros:
    "As pack_padded_sequence() does with lengths of 0."
    def forward(self, inputs):
        if not inputs.any(1).all():
            raise ValueError("a sample of zeros")
        return super().forward(inputs)

class NoZeros(RefusesZeros, nn.Sequential):
    pass

class Checked(RefusesZeros, nn.Linear):
    "A layer of a pipeline, on the parts of one sample that batch norm may refuse."

class Spread(nn.BatchNorm1d):
    "So that batch norm takes a sample alone."
    def forward(self, inputs):
        return super().forward(inputs.unflatten(1, (4, 2))).flatten(1)

def three_tests():
    found = spirals()
    return {**found, "test": [part[:3] for part in found["test"]]}

class Quantised(nn.Linear):
    def __init__(self, data):
        super().__init__(2, 3)
        self.small = nn.Parameter(torch.eye(2).to(torch.float8_e4m3fn), requires_grad=False)
        self.short = nn.Parameter(torch.ones(3, dtype=torch.int16), requires_grad=False)
    def forward(self, inputs):
        return super().forward(inputs @ self.small.float()) * self.short

class Auxiliary(TwoToThree):
    def forward(self, inputs):
        return (super().forward(inputs),) * 2 if self.training else super().forward(inputs)

class Unused(nn.Sequential):
    def __init__(self, data):
        super().__init__(nn.Linear(2, 8), nn.Linear(8, 3), nn.Linear(3, 3))
    def forward(self, inputs):
        return self[1](self[0](inputs))

class Puts(torch.autograd.Function):
    "The identity, whose backward torch does not compute deterministically."
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone().put_(torch.tensor([0]), gradient.flatten()[:1])

class Late(TwoToThree):
    "On the last rank, its training makes a parameter, which no optimizer has."
    def forward(self, inputs):
        is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        if self.training and is_last and not hasattr(self, "late"):
            self.late = nn.Parameter(torch.zeros(3))
        return super().forward(inputs)

class Grows(TwoToThree):
    def __init__(self, data):
        super().__init__(data)
        self.register_buffer("seen", torch.zeros(0))
    def forward(self, inputs):
        self.seen = torch.cat([self.seen, inputs.mean().view(1)]) if self.training else self.seen
        return super().forward(inputs)

class Unrepeatable(nn.Module):
    def forward(self, inputs):
        return Puts.apply(inputs)

class UnrepeatableLate(Unrepeatable):
    "Rank 0 gets there after the others."
    def forward(self, inputs):
        time.sleep(0.3 if os.environ["RANK"] == "0" else 0.0)
        return super().forward(inputs)

class Averaged(nn.Linear):
    "Adds its mean weights of the last passes, which it keeps in place or in a new tensor."
    def __init__(self, in_place):
        super().__init__(8, 8)
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(8, 8))
    def forward(self, inputs):
        if self.training:
            mean = self.mean if self.in_place else self.mean.clone()
            self.mean = mean.lerp_(self.weight.detach(), 0.5)
        return super().forward(inputs) + inputs @ self.mean

def averaged(in_place):
    return nn.Sequential(nn.Linear(2, 8), Averaged(in_place), nn.ReLU(), nn.Linear(8, 16), nn.Linear(16, 3))

class Transposed(nn.Module):
    "Two parameters in the same memory."
    def __init__(self):
        super().__init__()
        weight = 0.3 * torch.randn(8, 8)
        self.one, self.other = nn.Parameter(weight), nn.Parameter(weight.t())
    def forward(self, inputs):
        return (inputs @ self.one).tanh() @ self.other

class Seldom(nn.Linear):
    "With two ranks, the second one does not use this block from step FROM on. Its input has no gradient."
    step = 0
    def __init__(self, data):
        super().__init__(2, 2)
    def forward(self, inputs):
        self.step += self.training
        is_used = os.environ.get("RANK") == "0" or self.step < int(os.environ["FROM"])
        return super().forward(inputs) if is_used or not self.training else inputs + 1

seldom = lambda data: nn.Sequential(Seldom(data), nn.Linear(2, 8), nn.Linear(8, 3))
transposed = lambda data: nn.Sequential(nn.Linear(2, 8), Transposed(), nn.Linear(8, 8), nn.Linear(8, 3))

def turned(data):
    model = net(data)
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model

def hooked(data):
    model = net(data)
    model[2].weight.register_hook(lambda gradient: gradient / 2)
    return model

def with_attribute(data):
    model = net(data)
    model[2].weight.scale = 0.1
    return model

class Leaves(TwoToThree):
    "On the last rank, it ends the process as if all were well."
    def forward(self, inputs):
        if self.training and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            raise SystemExit(0)
        return super().forward(inputs)

averaged_in_place, averaged_anew = lambda data: averaged(True), lambda data: averaged(False)
expanded = lambda data: nn.ParameterDict({"one": nn.Parameter(torch.zeros(1).expand(3))})
breaks = lambda: {"train": Breaks(), "test": Breaks(), "target": "class", "num_classes": 3}
unlabelled = lambda: {**breaks(), "train": Unlabelled()}
line = lambda data: nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1))
broken_line = lambda data: BrokenModel(nn.Linear(2, 8), nn.Linear(8, 1))
buffered = lambda data: nn.Sequential(Buffered())
buffered_at_the_end = lambda data: nn.Sequential(nn.Linear(2, 2), Buffered())
noisy_at_the_end = lambda data: nn.Sequential(nn.Linear(2, 2), Noisy(data))
narrow = lambda data: Narrow(data).bfloat16()
normed = lambda data: nn.Sequential(Normed(2, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 3))
stateless = lambda data: nn.Sequential(
    nn.Linear(2, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
no_zeros = lambda data: NoZeros(nn.Linear(2, 8), nn.Linear(8, 3))
no_zeros_alone = lambda data: nn.Sequential(Checked(2, 8), Spread(4), nn.Linear(8, 3))
thaws = lambda data: nn.Sequential(nn.Linear(2, 8), Thaws(), nn.Linear(8, 3))
freezes = lambda data: nn.Sequential(nn.Linear(2, 8), Thaws(False), nn.Linear(8, 3))
unrepeatable = lambda data: nn.Sequential(nn.Linear(2, 8), Unrepeatable(), nn.Linear(8, 3))
unrepeatable_late = lambda data: nn.Sequential(nn.Linear(2, 8), UnrepeatableLate(), nn.Linear(8, 3))

plain = lambda data: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))

def split(generator):
    inputs, classes = spirals()["train"]
    order = generator.permutation(900)
    return {**spirals(), "train": (inputs[order], classes[order])}

split_at_random, split_by_its_own = lambda: split(np.random), lambda: split(np.random.default_rng())

def shorts():
    inputs, classes = spirals()["train"]
    pair = inputs, classes[:, None].repeat(1, 3).short()
    return {"train": pair, "test": pair, "target": "values"}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine")
    (path / "mine.py").write_text(f"{MINE}\n\n{SUMS}\n\n{OWN_TASK}\n\n{OWN_OPTIMIZER}\n{BREAKS}")
    return path


@pytest.fixture(scope="module")
def run(folder):
    """Return a function that returns a recipe's run with some options; each is trained once."""

    def start(recipe, world_size, *argv):
        how = {"name": f"{recipe}-{world_size}-{abs(hash(argv))}", "setup": functools.partial(import_from, folder)}
        argv = ("--device", "cpu", "--global-batch-size", "48", *argv, *SAME.get(recipe, ()))
        start_run(recipe, folder, world_size, *argv, **how).wait(check=True)
        return folder / how["name"]

    return functools.cache(start)


@pytest.fixture
def start(folder, tmp_path):
    """Return a function that starts a recipe's ranks, with the user's module, for a run in tmp_path / "run"."""

    setup = functools.partial(import_from, folder)
    return lambda recipe, world_size, *argv, **env: start_run(
        recipe, tmp_path, world_size, "--device", "cpu", *argv, setup=setup, **env
    )


SPIRALS = shlex.split("--data mine:spirals --model mine:net --max-steps 36 --warmup-steps 9 --lr 0.1")


@pytest.mark.parametrize("recipe", ["ddp", "horovod", "pipeline"])
def test_it_trains_on_one_curve_in_every_recipe(run, recipe):
    path, single = run(recipe, 2, *SPIRALS), run("single", 1, *SPIRALS)
    assert losses(path) == pytest.approx(losses(single), rel=1e-5)
    assert len(losses(path)) == 36
    ours, theirs = ([line for line in metrics(folder) if "test_loss" in line] for folder in (path, single))
    assert [line["test_accuracy"] for line in ours] == [line["test_accuracy"] for line in theirs]
    assert largest_difference(weights(path), weights(single)) < 1e-5
    assert losses(path)[-1] < 0.9 * losses(path)[0]


def test_a_random_split_is_the_same_on_all_ranks(start):
    start("ddp", 2, *SPIRALS, "--data", "mine:split_at_random", "--max-steps", "1").wait(check=True)
    line = start("ddp", 2, *SPIRALS, "--data", "mine:split_by_its_own", "--overwrite").wait().refusal
    what, fix = r"900 samples with digest \w{8}", "code and libraries; seed what --data draws, also at import"
    assert re.fullmatch(rf"error: rank 1: the training set is {what} on \S+, and {what} on rank 0; .* {fix}", line)


@pytest.mark.parametrize(
    ("recipe", "model", "argv", "count"),
    [("fsdp", "narrow", (), 1), *slow(("ddp", "narrow", (), 1), ("apex", "net", ("--opt-level", "O3"), 0))],
)
def test_weights_of_16_bits_that_are_trained_are_warned_of(start, recipe, model, argv, count):
    outcome = start(recipe, 2, *SPIRALS, "--model", f"mine:{model}", *argv, "--max-steps", "1").wait(check=True)
    assert outcome.text.count(" is trained in bfloat16, which loses small updates; ") == count


STEPPED = (*SPIRALS, "--lr", "0.01", "--lr-schedule", "constant", "--optimizer", "mine:head_first")


@pytest.mark.parametrize("recipe", ["ddp", "horovod", *slow("fsdp", "pipeline", "scratch", "apex", "spawn")])
def test_an_optimizer_of_your_own_steps_alike_in_every_recipe(run, recipe):
    path, single = run(recipe, 2, *STEPPED), run("single", 1, *STEPPED)
    assert losses(path) == pytest.approx(losses(single), rel=1e-5)
    assert largest_difference(weights(path), weights(single)) < 1e-5
    assert largest_difference(weights(single), weights(run("single", 1, *STEPPED, "--optimizer", "adamw"))) > 0.01


@pytest.mark.parametrize("recipe", ["ddp", *slow("horovod", "scratch")])
def test_an_optimizer_that_draws_random_numbers_draws_the_same_on_all_ranks(run, start, tmp_path, recipe):
    """Otherwise, the weights of the ranks would drift apart."""
    argv = (*SPIRALS, "--max-steps", "6", "--optimizer", "mine:shaking", "--global-batch-size", "48")
    outcome = start(recipe, 2, *argv, *SAME.get(recipe, ())).wait(check=True)
    assert losses(tmp_path / "run") == pytest.approx(losses(run("single", 1, *argv)), rel=1e-5)
    assert largest_difference(weights(tmp_path / "run"), weights(run("single", 1, *argv))) < 1e-5
    assert "draws other random numbers" not in outcome.text


@pytest.mark.parametrize(("recipe", "argv"), [("fsdp", ("--sharded-checkpoints",)), *slow(("tensor", ()))])
def test_an_own_optimizer_sees_whole_parameters_where_ranks_hold_shards(run, start, tmp_path, recipe, argv):
    options = shlex.split("--optimizer mine:lars --lr 0.02 --max-steps 12")
    argv = ("--global-batch-size", "48", *options, *argv)
    start(recipe, 2, *argv, "--max-steps", "5").wait(check=True)
    start(recipe, 2, *argv, "--resume", "auto").wait(check=True)
    assert losses(tmp_path / "run") == pytest.approx(losses(run("single", 1, *options)), rel=1e-5)


def test_shards_keep_the_attributes_of_parameters_that_an_own_optimizer_reads(run):
    options = (*SPIRALS, "--model", "mine:with_attribute", "--optimizer", "mine:by_attribute", "--max-steps", "5")
    path, single = run("fsdp", 2, *options), run("single", 1, *options)
    assert losses(path) == pytest.approx(losses(single), rel=1e-5)


def test_parameters_that_are_not_contiguous_are_sharded(run):
    options = (*SPIRALS, "--model", "mine:turned", "--max-steps", "5")
    path, single = run("fsdp", 2, *options), run("single", 1, *options)
    assert losses(path) == pytest.approx(losses(single), rel=1e-5)
    assert largest_difference(weights(path), weights(single)) < 1e-5


ALONE = r"rank 1: --optimizer mine:fails_on_rank_1 failed: KeyError: '1' \(.*\); fix it .*"


@pytest.mark.parametrize(
    ("recipe", "optimizer", "words"),
    [
        ("ddp", "fails_on_rank_1", ALONE),
        (
            "ddp",
            "timed",
            "--optimizer mine:timed: no checkpoint gives back clock of a group, .*; let it keep ten.*",
        ),
        (
            "horovod",
            "scaled",
            "--optimizer mine:scaled: Horovod builds it only from its groups, and scale is then 1.0, not 20.*",
        ),
        (
            "horovod",
            "step_hook",
            "--optimizer mine:step_hook: Horovod builds it only from its groups, and drops the hooks of its .*",
        ),
        (
            "pipeline",
            "scaling",
            "--optimizer mine:scaling: a step leaves another (norm|lr) of a group on each stage, which has .*",
        ),
        (
            "fsdp",
            "own_rows",
            r"--optimizer mine:own_rows: step\(\) on shards failed: RuntimeError: .* mixed .*\(.*mine.py, "
            r"line \d+\); let it use other operations, or use RECIPE=ddp",
        ),
        (
            "fsdp",
            "counts",
            "--optimizer mine:counts: by_row of a parameter's state is not sharded as the parameter is, so that "
            r"no checkpoint could restore it; let it keep numbers and tensors of its shape, .*, or use RECIPE=ddp",
        ),
        *slow(
            (
                "fsdp",
                "whole_norm",
                r"--optimizer mine:whole_norm: norm of a group is spread over the ranks \(DTensor\); let it .*",
            ),
            ("fsdp", "fails_on_rank_1", ALONE),
            ("pipeline", "fails_on_rank_1", ALONE),
        ),
    ],
)
def test_an_optimizer_that_does_not_work_ends_all_ranks_with_one_line(start, recipe, optimizer, words):
    line = start(recipe, 2, *SPIRALS, "--optimizer", f"mine:{optimizer}").wait().refusal
    assert re.fullmatch(f"error: {words}", line)


@pytest.mark.parametrize(
    ("recipe", "optimizer", "words"),
    [
        ("ddp", "late_timed", "no checkpoint gives back clock of a group, .*; let it keep tensors.*"),
        ("fsdp", "late_rows", "by_row of a parameter's state is not sharded as the parameter is, so that no .*"),
    ],
)
def test_an_optimizer_whose_state_changes_later_ends_before_a_checkpoint(
    start, tmp_path, recipe, optimizer, words
):
    """The checkpoint before that stays."""
    argv = (*SPIRALS, "--optimizer", f"mine:{optimizer}", "--checkpoint-every", "2", "--max-steps", "6")
    line = start(recipe, 2, *argv).wait().refusal
    assert re.fullmatch(f"error: --optimizer mine:{optimizer}: {words}", line)
    assert newest_checkpoint(tmp_path / "run")["position"]["step"] == 2


@pytest.mark.parametrize(
    ("recipe", "optimizer"), [("ddp", "head_first"), ("pipeline", "slowing"), *slow(("ddp", "slowing"))]
)
def test_a_resume_restores_an_optimizer_of_your_own(run, start, tmp_path, recipe, optimizer):
    argv = ("--global-batch-size", "48", *STEPPED, "--optimizer", f"mine:{optimizer}", "--deterministic")
    argv += SAME[recipe]
    whole = run(recipe, 2, *argv)
    start(recipe, 2, *argv, "--max-steps", "20").wait(check=True)
    start(recipe, 2, *argv, "--resume", "auto").wait(check=True)
    assert is_equal(weights(tmp_path / "run"), weights(whole))


@pytest.mark.parametrize(
    ("recipe", "model", "argv"),
    [
        ("fsdp", "copied_by_rank", ()),
        ("fsdp", "normalised_by_rank", ()),
        ("pipeline", "normalised_by_rank", ()),
        ("ddp", "wider_by_rank", ()),
        *slow(("fsdp", "drawn_by_rank", ("--replicas", "2")), ("pipeline", "copied_by_rank", ())),
    ],
)
def test_a_model_that_differs_between_ranks_is_refused(start, recipe, model, argv):
    """Shards and stages would be of several models; no rank can take another's values for other layers."""
    line = start(recipe, 2, "--data", "mine:spirals", "--model", f"mine:{model}", *argv).wait().refusal
    if model == "wider_by_rank":
        what = r"a model of 4 tensors, whose names and shapes have the digest (\w{8})"
        how = "build the same layers"
    else:
        what = r"a model with parameters of digest (\w{8}) and buffers of digest (\w{8})"
        how = "draw or read the same values"
    pattern = rf"error: rank 1: --model mine:{model} is {what} on \S+, and {what} on rank 0; let all ranks {how}"
    own = re.fullmatch(pattern, line).groups()
    is_same = [here == there for here, there in zip(own[: len(own) // 2], own[len(own) // 2 :], strict=True)]
    assert is_same == {"wider_by_rank": [False], "normalised_by_rank": [True, False]}.get(model, [False, True])


@pytest.mark.parametrize(
    ("recipe", "model", "argv"),
    [
        ("scratch", "normalised_by_rank", ()),
        ("apex", "drawn_by_rank", ("--opt-level", "O2")),
        ("tensor", "drawn_by_rank", ("--tensor-parallel", "1")),
        *slow(("horovod", "normalised_by_rank", ("--compression", "none"))),
    ],
)
def test_a_model_that_differs_between_ranks_is_rank_0s(start, tmp_path, recipe, model, argv):
    words = ("--data", "mine:spirals", "--model", f"mine:{model}", "--max-steps", "20", "--log-every", "1", *argv)
    start(recipe, 2, *words).wait(check=True)
    run = (tmp_path / "run").rename(tmp_path / "two")
    start(recipe, 1, *words).wait(check=True)
    assert losses(run) == pytest.approx(losses(tmp_path / "run"), rel=1e-2 if recipe == "apex" else 1e-5)
    assert len(losses(run)) == 20


VALUES = ("--data", "mine:values", "--model", "mine:line", "--task", "mine:SquaredError", "--max-steps", "5")


@pytest.mark.parametrize("recipe", ["ddp", "pipeline"])
def test_a_task_of_your_own_is_evaluated_exactly(run, recipe):
    path, single = run(recipe, 2, *VALUES), run("single", 1, *VALUES)
    assert losses(path) == pytest.approx(losses(single), rel=1e-5)
    (last,) = [line for line in metrics(path) if "test_loss" in line]
    namespace = {}
    exec(compile((path.parent / "mine.py").read_text(), "mine.py", "exec"), namespace)
    inputs, targets = namespace["values"]()["test"]
    model = namespace["line"](None)
    model.load_state_dict(weights(path))
    errors = (model(inputs) - targets).double()
    assert last["test_loss"] == pytest.approx(errors.square().mean().item(), rel=1e-6)
    assert last["test_absolute_error"] == pytest.approx(errors.abs().mean().item(), rel=1e-6)
    assert last["test_rms_error"] == pytest.approx(last["test_loss"] ** 0.5)


@pytest.mark.parametrize("broken", ["56", *slow("57,63")], ids=["before training", "in training"])
def test_a_sample_that_raises_an_error_ends_all_ranks_with_one_line(run, start, folder, tmp_path, broken):
    """The digest that ranks compare reads every eighth sample, including 56. Rank 1 reads sample 57 in step 5."""
    argv = ("--data", "mine:breaks", "--model", "mine:net", "--max-steps", "8", "--global-batch-size", "8")
    argv += ("--checkpoint-every", "1")
    line = start("ddp", 2, *argv, "--workers", "1", BREAK=broken).wait().refusal
    pattern = r"error: rank 1: --data mine:breaks: 'train'\[(\d+)\] failed: ValueError: sample \1 is broken "
    number = (folder / "mine.py").read_text().split("raise ValueError")[0].count("\n") + 1
    found = re.fullmatch(pattern + rf"\({folder}/mine.py, line {number}\); fix it, then add --resume auto", line)
    assert found, line
    assert found[1] in broken.split(",")
    begun = (tmp_path / "run").exists()
    assert begun == (broken != "56")
    if begun:
        assert newest_checkpoint(tmp_path / "run")["position"]["step"] == 4
        start("ddp", 2, *argv, "--workers", "0", "--resume", "auto").wait(check=True)
        whole = run("single", 1, *argv, "--workers", "0")
        assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-5)


ANSWERS = shlex.split("--data mine:sums --model gpt-tiny --optimizer adamw --lr 0.004 --max-steps 6")
SHARED_OUT = [
    *[("ddp", 2, ("--accumulate-steps", "2")), ("pipeline", 2, ()), ("context", 2, ())],
    *slow(
        *[("single", 1, ("--accumulate-steps", "3")), ("dataparallel", 1, ()), ("spawn", 2, ()), ("apex", 2, ())],
        *[("ddp", 2, ("--zero",)), ("fsdp", 3, ()), ("tensor", 4, ("--tensor-parallel", "2")), ("scratch", 3, ())],
        *[("horovod", 2, ()), ("pipeline", 4, ("--stages", "2")), ("context", 4, ("--fully-shard",))],
    ),
]


@pytest.mark.parametrize(("recipe", "world_size", "argv"), SHARED_OUT)
def test_the_loss_is_the_mean_over_all_targets_that_count(run, recipe, world_size, argv):
    """Shares of a batch have different numbers of them, so that the mean of the shares' means is another."""
    found, single = run(recipe, world_size, *ANSWERS, *argv), run("single", 1, *ANSWERS)
    assert losses(found) == pytest.approx(losses(single), rel=1e-5)
    tested, expected = (metrics(path)[-1]["test_loss"] for path in (found, single))
    assert tested == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_a_step_is_that_of_cross_entropy(run, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    argv = (*ANSWERS, "--global-batch-size", "800")
    args = options(["--device", "cpu", *argv])
    data = load_data(args, torch.device("cpu"), print)
    ((inputs, targets),) = data.train.batches([torch.arange(800)], 0)
    output = build_model(args, data, torch.device("cpu"))(inputs)
    expected = torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    assert losses(run("single", 1, *argv))[0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("recipe", "world_size"), [("ddp", 2), *slow(("single", 1), ("pipeline", 2))])
@pytest.mark.parametrize("labelled", [64, 63])
def test_a_step_in_which_no_target_counts_is_warned_of_once(start, recipe, world_size, labelled):
    """Its loss is 0, as if the model were perfect. Of 64 samples, the last one may count."""
    argv = ("--data", "mine:unlabelled", "--model", "mine:net", "--max-steps", "3", "--global-batch-size", "64")
    argv += ("--workers", "0")
    outcome = start(recipe, world_size, *argv, LABELLED=str(labelled)).wait(check=True)
    warning = "warning: no target of step 1 counts (those of class -100 do not), so its loss is 0"
    assert outcome.text.count(warning) == outcome.text.count("warning: no target") == (labelled == 64)


@pytest.mark.parametrize(
    ("recipe", "broken"), [("ddp", "task"), ("ddp", "derive"), ("pipeline", "task"), ("ddp", "model")]
)
def test_steps_are_kept_if_your_code_breaks_in_the_evaluation(run, start, tmp_path, recipe, broken):
    argv = ("--data", "mine:values", "--model", "mine:broken_line", "--task", "mine:BrokenMetric")
    argv = ("--global-batch-size", "48", "--max-steps", "5", *argv, *SAME[recipe])
    outcome = start(recipe, 2, *argv, BREAK=broken).wait()
    assert f"ValueError: too many samples for this {'model' if broken == 'model' else 'metric'}" in outcome.text
    if broken != "model":
        assert "ValueError: too many samples for this metric" in outcome.refusal
    assert newest_checkpoint(tmp_path / "run")["position"]["step"] == 5
    start(recipe, 2, *argv, "--resume", "auto").wait(check=True)
    assert largest_difference(weights(tmp_path / "run"), weights(run(recipe, 2, *VALUES))) == 0


@pytest.mark.parametrize(
    ("recipe", "world_size", "model", "count"),
    [
        ("ddp", 2, "Noisy", 1),
        ("single", 1, "Noisy", 0),
        ("ddp", 2, "net", 0),
        ("pipeline", 2, "noisy_at_the_end", 1),
        *slow(("fsdp", 2, "Noisy", 1)),
    ],
)
def test_a_model_that_draws_random_numbers_in_its_code_is_warned_of(start, recipe, world_size, model, count):
    argv = ("--data", "mine:spirals", "--model", f"mine:{model}", "--max-steps", "3")
    outcome = start(recipe, world_size, *argv).wait(check=True)
    warning = "warning: your model draws other random numbers on each rank, so losses depend on the number"
    assert outcome.text.count(warning) == count


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ("--task mine:Shaken", "task"),
        *slow(("--task mine:Shaken --data mine:spirals --model mine:net", "model or task")),
        *slow(("--task mine:Steady", "")),
    ],
)
def test_a_task_that_draws_random_numbers_is_warned_of(start, argv, names):
    outcome = start("ddp", 2, *argv.split(), "--max-steps", "3", "--optimizer", "mine:shaking").wait(check=True)
    found = re.findall(r"warning: your (.*) draws other random numbers on each rank, so losses", outcome.text)
    assert found == ([names] if names else [])


@pytest.mark.parametrize(
    ("recipe", "world_size", "replicas"),
    [("ddp", 2, 2), ("pipeline", 2, 1), *slow(("pipeline", 4, 2), ("fsdp", 2, 2), ("single", 1, 1))],
)
def test_an_embedding_that_scales_its_rows_is_warned_of(start, recipe, world_size, replicas):
    """It writes to its weight in forward(): in ddp, weights of ranks drift apart; fsdp scales a copy."""
    argv = ("--data", "mine:spirals", "--model", "mine:normed", "--max-steps", "2", *SAME.get(recipe, ()))
    outcome = start(recipe, world_size, *argv).wait(check=True)
    what = "0 has max_norm, by which each rank scales the rows of its own part of the batch"
    warning = f"warning: {what}, so losses depend on the number of processes"
    assert outcome.text.count(warning) == (replicas > 1)


@pytest.mark.parametrize(
    ("recipe", "world_size", "argv", "count"),
    [
        ("pipeline", 2, ("--num-microbatches", "2"), 1),
        ("single", 1, ("--accumulate-steps", "2"), 1),
        ("single", 1, (), 0),
    ],
)
def test_a_buffer_that_each_pass_changes_is_warned_of(start, recipe, world_size, argv, count):
    """Spectral norm's vectors, too: a step of several passes changes it several times."""
    argv = (*SPIRALS, "--model", "mine:averaged_anew", "--max-steps", "2", *argv)
    outcome = start(recipe, world_size, *argv).wait(check=True)
    warning = (
        "warning: each of a step's 2 passes changes your model's buffer 1.mean, so losses depend on the number"
    )
    assert outcome.text.count(warning) == count


def test_a_buffer_that_a_microbatch_needs_is_not_changed_in_place(start):
    outcome = start("pipeline", 2, *SPIRALS, "--model", "mine:averaged_in_place", "--num-microbatches", "2").wait(
        60
    )
    what = "a layer changes in place, perhaps a buffer, what the backward of an earlier microbatch needs"
    line = f"error: --model mine:averaged_in_place: {what}; let it make a new tensor, or use RECIPE=ddp"
    assert line in outcome.errors, outcome.text
    assert "Traceback" not in outcome.text


@pytest.mark.parametrize(
    ("recipe", "argv", "refusal"),
    [
        ("ddp", (), ""),
        (
            "fsdp",
            (),
            "2.weight has a gradient hook, and FSDP replaces parameters by shards; let a hook of the module",
        ),
        *slow(
            ("apex", ("--opt-level", "O2"), "2.weight of --model mine:hooked has a gradient hook, and its half")
        ),
    ],
)
def test_a_gradient_hook_is_warned_of_or_refused(run, start, recipe, argv, refusal):
    """A rank has the gradient of its part of the batch: a hook that clips would clip another one."""
    argv = (*SPIRALS, "--model", "mine:hooked", "--max-steps", "3", *argv)
    outcome = start(recipe, 2, *argv).wait()
    if refusal:
        assert refusal in outcome.refusal
        return
    warning = "warning: the gradient hook of 2.weight gets the gradient of each of 2 parts of the batch, so losses"
    assert outcome.text.count(warning) == 1
    assert not any(outcome.statuses), outcome.text


def test_a_parameter_whose_values_are_one_number_is_refused(start):
    line = start("single", 1, "--data", "mine:spirals", "--model", "mine:expanded").wait().refusal
    what = "several values of one are one number in memory, as expand() makes them, and no step can change that"
    assert line == f"error: --model mine:expanded: {what}; clone() it"


@pytest.mark.parametrize(
    ("recipe", "world_size", "model", "warning"),
    [
        ("ddp", 2, "RunningMean", "each rank changes your model's buffer mean by its own samples"),
        ("single", 1, "RunningMean", ""),
        ("ddp", 2, "Centred", "your model's output for a sample depends on the other samples of its batch"),
        ("fsdp", 2, "Centred", "your model's output for a sample depends on the other samples of its batch"),
        ("single", 1, "Centred", ""),
        ("ddp", 2, "stateless", "batch norm normalises each of 2 parts of the batch by itself"),
    ],
)
def test_losses_that_depend_on_the_number_of_processes_are_warned_of(start, recipe, world_size, model, warning):
    """Before the second step is done."""
    outcome = start(recipe, world_size, *SPIRALS, "--model", f"mine:{model}", "--max-steps", "2").wait(check=True)
    found = re.findall(r"warning: (.*), so losses (?:and metrics )?depend on the number", outcome.text)
    assert found == [warning] * bool(warning)


def test_groups_of_batch_norm_without_running_statistics_have_none_to_average(start):
    """An evaluation still normalises by the samples of a pass."""
    argv = (*SPIRALS, "--model", "mine:stateless", "--max-steps", "2", "--global-batch-size", "48")
    outcome = start("ddp", 2, *argv, "--batchnorm-group", "24").wait(check=True)
    warning = "your model's output for a sample depends on the other samples of its batch"
    assert re.findall(r"warning: (.*), so losses (?:and metrics )?depend on the number", outcome.text) == [warning]


@pytest.mark.parametrize("recipe", ["single", *slow("ddp", "fsdp")])
@pytest.mark.parametrize("case", ["rejects equal samples", "width", "bool", "noise", "counts"])
def test_a_model_that_two_equal_samples_do_not_probe_is_trained(start, recipe, case):
    """Two parts of a batch in each recipe: only then does a run warn of samples that depend on each other."""
    argv = (*SPIRALS, "--model", "mine:Odd", "--max-steps", "2", "--accumulate-steps", "2")
    outcome = start(recipe, 1 if recipe == "single" else 2, *argv, ODD=case).wait()
    assert "other samples of its batch" not in outcome.text
    if case == "bool":  # such an output has no gradient
        assert "loss_sum() has to return a scalar tensor that gradients come from" in outcome.refusal
    else:
        assert not any(outcome.statuses), outcome.text


@pytest.mark.parametrize("recipe", ["ddp", *slow("fsdp", "scratch", "apex")])
def test_a_rank_with_fewer_samples_to_evaluate_invents_none(run, recipe):
    """Of three samples, rank 0 has one, and rank 1 two, one after the other."""
    argv = shlex.split("--data mine:three_tests --model mine:no_zeros --global-batch-size 2 --max-steps 3")
    argv.append("--deterministic")
    path = run(recipe, 2, *argv)
    single = run("single", 1, *argv)
    ours, theirs = (metrics(folder)[-1] for folder in (path, single))
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-6)
    assert ours["test_accuracy"] == theirs["test_accuracy"]


@pytest.mark.parametrize(
    ("recipe", "world_size"), [("pipeline", 2), *slow(("pipeline", 4), ("fsdp", 2), ("ddp", 2))]
)
def test_checks_before_the_training_invent_no_sample(start, recipe, world_size):
    """Each part of a batch has one sample, which batch norm may refuse; four ranks of pipeline settle buckets."""
    argv = ("--data", "mine:spirals", "--model", "mine:no_zeros_alone", "--max-steps", "2", "--deterministic")
    argv += ("--global-batch-size", "4", *(("--num-microbatches", "2") if recipe == "pipeline" else ()))
    argv += ("--accumulate-steps", "2" if world_size == 2 else "1", "--lr", "0.01")
    start(recipe, world_size, *argv).wait(check=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "Borrows",
            "forward() uses a parameter without calling its module, and FSDP gathers it when that is called; "
            "call the module, or use RECIPE=ddp",
        ),
        ("add_to", "a block changes its own input in place, and FSDP would not see when its backward ends; let "),
    ],
    ids=["no call", "in place"],
)
def test_fsdp_names_what_it_cannot_train(start, model, message):
    outcome = start("fsdp", 2, *SPIRALS, "--model", f"mine:{model}").wait()
    assert outcome.statuses == [2, 2], outcome.text
    assert "Traceback" not in outcome.text
    assert f"error: {message}" in outcome.text


@pytest.mark.parametrize("recipe", ["ddp", *slow("fsdp")])
def test_a_model_with_several_outputs_in_training_is_refused(start, recipe):
    refusal = start(recipe, 2, "--data", "mine:spirals", "--model", "mine:Auxiliary").wait().refusal
    said = "error: --model mine:Auxiliary returned a tuple in training; return a tensor with a row"
    assert refusal.startswith(said)


BRANCHES = ("--data", "mine:spirals", "--model", "mine:Branches", "--max-steps", "4", "--warmup-steps", "0")
ACCUMULATED = (*BRANCHES, "--accumulate-steps", "2")
UNUSED, DETACHED = (*BRANCHES, "--model", "mine:Unused"), (*BRANCHES, "--model", "mine:Detached")
TURNS = (*BRANCHES, "--model", "mine:Turns", "--max-steps", "7", "--lr", "0.5")


@pytest.mark.parametrize(
    ("recipe", "argv"),
    [("scratch", BRANCHES), ("scratch", UNUSED), ("fsdp", UNUSED), ("scratch", TURNS), ("horovod", TURNS)],
    ids=lambda value: value if isinstance(value, str) else value[3],
)
def test_parameters_without_a_gradient_on_a_rank_leave_the_curve_as_it_is(run, recipe, argv):
    """What no rank uses in a step stays as it is, as with one process: no momentum, no weight decay."""
    path, single = run(recipe, 2, *argv), run("single", 1, *argv)
    assert losses(path) == pytest.approx(losses(single), rel=1e-5)
    assert largest_difference(weights(path), weights(single)) < 1e-5


THAWS = (*BRANCHES, "--model", "mine:thaws", "--max-steps", "5")


@pytest.mark.parametrize(
    ("recipe", "argv"),
    [
        ("ddp", ()),
        ("fsdp", ()),
        *slow(("tensor", ("--tensor-parallel", "1")), ("context", ("--context-parallel", "1"))),
        *slow(("pipeline", ("--stages", "1", "--num-microbatches", "1")), ("apex", ("--opt-level", "O0"))),
        *slow(("horovod", ())),
    ],
)
def test_a_parameter_that_training_thaws_is_refused_where_ranks_do_not_exchange_it(start, tmp_path, recipe, argv):
    """Its gradient would be each rank's own."""
    outcome = start(recipe, 2, *THAWS, *argv).wait(60)
    assert set(outcome.statuses) == {2}, outcome.text
    fix = "set it in --model, or use RECIPE=scratch"
    name = "sequence.1.weight" if recipe == "pipeline" else "1.weight"  # of a stage
    said = f"error: training has set requires_grad of {name}, whose gradient the ranks do not exchange; {fix}"
    assert set(outcome.errors) == {said}, outcome.text
    assert len(losses(tmp_path / "run")) == 2, outcome.text


def test_a_parameter_that_training_freezes_is_named_in_ddp(start):
    """DDP numbers the parameters that it was given."""
    line = start("ddp", 2, *BRANCHES, "--model", "mine:freezes", "--max-steps", "5").wait().errors[0]
    assert re.match(r"error: the parameter 1\.(weight|bias) got no gradient, and DDP needs all", line)


def test_a_parameter_that_training_thaws_keeps_the_curve_in_scratch(run):
    assert losses(run("scratch", 2, *THAWS)) == pytest.approx(losses(run("single", 1, *THAWS)), rel=1e-5)


SOME = r"the parameter other\.bias got a gradient on some ranks or in some steps only, and FSDP"
NONE = r"the parameter (seldom|other)\.weight got no gradient, and DDP needs all"
IN_EVAL = r"--deterministic: the parameter 2\.weight got no gradient in eval\(\)"
MISSING = [
    ("fsdp", BRANCHES, "1", SOME),
    ("fsdp", BRANCHES, "2", SOME),
    ("ddp", BRANCHES, "2", NONE),
    ("ddp", ACCUMULATED, "2", NONE),
    ("apex", ACCUMULATED, "2", NONE),
    ("ddp", (*UNUSED, "--deterministic"), "1", IN_EVAL),
    ("ddp", DETACHED, "1", "the parameter weight got no gradient, and DDP needs all"),
]


@pytest.mark.parametrize(("recipe", "argv", "begin", "message"), MISSING, ids=lambda value: str(value)[:8])
def test_ranks_without_the_same_gradients_end_with_one_line(start, recipe, argv, begin, message):
    outcome = start(recipe, 2, *argv, FROM=begin).wait(60)
    assert outcome.statuses == [2, 2], outcome.text
    assert "Traceback" not in outcome.text
    fix = r"set requires_grad to False if it is never used, or use RECIPE=horovod"
    lines = set(outcome.errors)
    assert 1 <= len(lines) <= 2, outcome.text
    assert len(outcome.errors) == len(lines), "ranks with the same error print it once"
    assert all(re.fullmatch(rf"error: (rank \d: )?{message}.*; {fix}.*", line) for line in lines), outcome.text


@pytest.mark.parametrize("recipe", ["ddp", *slow("fsdp", "horovod")])
def test_an_operation_that_cannot_be_repeated_is_named_in_one_line(start, recipe):
    argv = ("--data", "mine:spirals", "--model", "mine:unrepeatable", "--max-steps", "1", "--deterministic")
    outcome = start(recipe, 2, *argv).wait(60)
    fix = "put_ has no deterministic implementation on this device; use another, or drop --deterministic"
    assert (set(outcome.statuses), set(outcome.errors)) == ({2}, {f"error: {fix}"}), outcome.text
    assert len(outcome.errors) == (2 if recipe == "horovod" else 1), "ranks of Horovod share no store"
    assert "Traceback" not in outcome.text


def test_an_error_that_ranks_of_all_nodes_have_is_printed_once(folder, tmp_path):
    """The line of node 1, which is the first, is dropped: node 0 ends with the same status."""
    argv = ("--data", "mine:spirals", "--model", "mine:unrepeatable_late", "--max-steps", "1", "--deterministic")
    words = words_for(tmp_path, "run", "--device", "cpu", *argv)
    result = local("ddp", 2, 1, *words, PYTHONPATH=str(folder)).wait()
    said = "put_ has no deterministic implementation on this device; use another, or drop --deterministic"
    assert (result.status, result.errors) == (2, [f"error: {said}"]), result
    assert result.stderr.count(said) == 1


@pytest.mark.parametrize(
    ("recipe", "world_size", "model", "what"),
    [
        ("single", 1, "Grows", "seen is (0,) before it and (1,) after the first step"),
        ("ddp", 2, "Late", "late is missing before it and (3,) after the first step"),
        *slow(("fsdp", 2, "Grows", "seen is (0,) before it and (1,) after the first step")),
    ],
)
def test_a_model_whose_state_changes_in_training_is_refused(start, recipe, world_size, model, what):
    """No resume could load its checkpoints, and nothing trains a parameter that comes later."""
    fix = "make all parameters and buffers in __init__(), with their final shapes"
    who = "rank 1: " * (model == "Late")
    argv = ("--data", "mine:spirals", "--model", f"mine:{model}")
    line = start(recipe, world_size, *argv).wait(60).refusal
    assert line == f"error: {who}--model mine:{model}: its state changes in training: {what}; {fix}"


@pytest.mark.parametrize(("recipe", "world_size"), [("single", 1), ("ddp", 2)])
def test_code_that_ends_a_rank_with_status_0_is_named(start, recipe, world_size):
    outcome = start(recipe, world_size, "--data", "mine:spirals", "--model", "mine:Leaves").wait(60)
    assert outcome.statuses[-1] == 2, outcome.text
    last = [line for line in outcome.outputs[-1].splitlines() if line.startswith("error: ")]
    assert len(last) == 1, outcome.text
    assert re.fullmatch(r"error: rank \d left the job: SystemExit: 0 \(\S*mine\.py, line \d+\); .*", last[0])


@pytest.mark.parametrize(
    ("case", "what", "env"),
    [
        ("other", "experts.1.0", {}),
        ("none", "nothing", {}),
        ("order", "experts.1.0", {}),
        ("other", "experts.1.0", {"EVALUATES": "1"}),
    ],
    ids=["other", "none", "order", "evaluation"],
)
def test_fsdps_ranks_that_run_different_blocks_end_with_one_line(start, case, what, env):
    """Gloo would abort them, or mix the weights of two blocks of one size."""
    ranks = start("fsdp", 2, "--data", "mine:spirals", "--model", "mine:Experts", CASE=case, **env)
    assert ranks.wait(60).refusal == (
        f"error: rank 1 runs {what} where rank 0 runs experts.0.0, and FSDP gathers in order; "
        "run the same blocks on all ranks in every pass, or use RECIPE=horovod"
    )


@pytest.mark.parametrize(
    ("case", "what", "first", "argv"),
    [
        ("other", "experts.1.0", "experts.0.0", ()),
        ("none", "nothing", "experts.0.0", ()),
        *slow(("order", "experts.1.0", "experts.0.0", ("--compile",))),
    ],
)
def test_a_rank_of_fsdp_that_runs_other_blocks_in_a_later_step_says_so(start, tmp_path, case, what, first, argv):
    argv = ("--data", "mine:spirals", "--model", "mine:Experts", *argv)
    outcome = start("fsdp", 2, *argv, CASE=case, FROM="3").wait()
    assert outcome.statuses == [1, 2], outcome.text
    assert re.findall("error: .*", outcome.outputs[1]) == [
        f"error: rank 1 runs {what} where its first pass ran {first}, and FSDP gathers in order; "
        "run the same blocks on all ranks in every pass, or use RECIPE=horovod"
    ]
    assert re.fullmatch(r"error: rank 0 on \S+ lost another rank: .*", outcome.outputs[0].splitlines()[-1])
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.parametrize("begin", ["1", *slow("3")])
def test_a_block_of_fsdp_that_one_rank_does_not_use_is_named(start, begin):
    """Ranks would wait in different exchanges."""
    outcome = start("fsdp", 2, "--data", "mine:spirals", "--model", "mine:seldom", FROM=begin).wait(60)
    what = "the block 0 got gradients on some ranks or in some steps only, and FSDP sums them block by block"
    assert outcome.statuses == [2 if begin == "1" else 1, 2], outcome.text
    assert any(line.startswith(f"error: {what}; set requires_grad to ") for line in outcome.errors), outcome.text


@pytest.mark.parametrize(("recipe", "argv"), [("ddp", ("--zero",)), ("fsdp", ()), ("pipeline", ()), ("ddp", ())])
def test_two_parameters_in_the_same_memory_are_refused_where_they_would_be_copied(start, recipe, argv):
    argv = ("--data", "mine:spirals", "--model", "mine:transposed", "--max-steps", "2", *argv)
    outcome = start(recipe, 2, *argv).wait()
    if recipe == "ddp" and "--zero" not in argv:
        assert not any(outcome.statuses), outcome.text
    else:
        what = "1.one and 1.other are two parameters in the same memory; make one of them, and use its view in "
        assert outcome.refusal.startswith(f"error: --model mine:transposed: {what}")


BUFFERED = ("--data", "mine:spirals", "--model", "mine:buffered", "--max-steps", "2")


@pytest.mark.parametrize("recipe", ["scratch", "horovod"])
def test_buffers_of_any_type_are_those_of_the_first_rank(run, recipe):
    kept = newest_checkpoint(run(recipe, 2, *BUFFERED))["model"]
    assert all(kept[name].float().eq(1).all() for name in ("0.int16", "0.float8_e4m3fn"))


@pytest.mark.parametrize(
    ("recipe", "ranks", "model", "argv"),
    [
        ("ddp", 2, "buffered", ()),
        ("apex", 2, "buffered", ("--opt-level", "O0")),
        ("pipeline", 2, "buffered", ("--stages", "1", "--num-microbatches", "1")),
        # The buffers are not in rank 0's stage.
        ("pipeline", 4, "buffered_at_the_end", ("--stages", "2")),
        ("ddp", 2, "Quantised", ()),
    ],
)
def test_tensors_that_ddp_cannot_send_are_refused(start, recipe, ranks, model, argv):
    who = "rank 1: " * (ranks == 4)
    job = start(recipe, ranks, *BUFFERED, "--model", f"mine:{model}", *argv)
    assert job.wait(60).refusal == (
        f"error: {who}--model mine:{model}: DDP cannot send its int16 or float8 tensors over gloo; "
        "use another dtype, or RECIPE=fsdp"
    )


def test_tensors_that_nccl_cannot_send_are_refused_in_one_line_too(monkeypatch):
    said = "Input tensor data type is not supported for NCCL process group: Short"  # ProcessGroupNCCL.cpp
    line = "^--model lenet: DDP cannot send its int16 or float8 tensors over NCCL; use another dtype, or"
    for text, kind, message in ((said, UserError, line), ("another", TypeError, "another")):
        monkeypatch.setattr(buckets, "DistributedDataParallel", Mock(side_effect=TypeError(text)))
        with pytest.raises(kind, match=message):
            buckets.wrap_in_ddp(torch.nn.Linear(1, 1), options([]))


def test_sparse_gradients_that_nccl_cannot_sum_are_refused(monkeypatch):
    """Its ranks would fail in their first backward."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.EmbeddingBag(4, 2, mode="sum", sparse=True))
    with pytest.raises(UserError, match=r"^--model lenet: 1 has sparse gradients, which NCCL cannot sum; make it"):
        buckets.wrap_in_ddp(model, options([]))


@pytest.mark.parametrize("argv", [(), *slow((("--resume", "auto"),))])
def test_frozen_parameters_of_any_type_are_in_fsdps_checkpoints(start, tmp_path, argv):
    quantised = ("--data", "mine:spirals", "--model", "mine:Quantised")
    start("fsdp", 2, *quantised, "--max-steps", "1").wait(check=True)
    if argv:
        start("fsdp", 2, *quantised, "--max-steps", "2", *argv).wait(check=True)
    kept = weights(tmp_path / "run")
    assert kept["small"].dtype == torch.float8_e4m3fn
    assert kept["small"].float().tolist() == [[1, 0], [0, 1]]
    assert is_equal(kept["short"], torch.ones(3, dtype=torch.int16))


DTYPES = [
    ("horovod", (),
        "Horovod: Tensor type torch.BFloat16Tensor is not supported; use another dtype, or RECIPE=ddp"),
    ("fsdp", (),
        "first.weight is torch.float32, second.weight of the same block torch.bfloat16, and FSDP sends a block's "
        "parameters as one; use one dtype, or RECIPE=ddp"),
    ("ddp", ("--zero",),
        "--zero: ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got both "
        "torch.FloatTensor and torch.BFloat16Tensor; use one dtype, or drop --zero"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "own", "message"), DTYPES, ids=lambda value: str(value)[:8])
def test_parameters_whose_types_a_recipe_cannot_train_are_refused(start, recipe, own, message):
    job = start(recipe, 2, "--data", "mine:spirals", "--model", "mine:Mixed", *own)
    assert job.wait(60).refusal == f"error: --model mine:Mixed: {message}"


@pytest.mark.parametrize("recipe", ["ddp", "horovod", *slow("fsdp")])
def test_ranks_wait_for_a_sample_that_takes_longer_than_their_time_limit(start, recipe):
    argv = ("--data", "mine:spirals", "--model", "mine:net", "--task", "mine:SlowSample")
    outcome = start(recipe, 2, *argv, "--max-steps", "2", "--timeout-s", "5").wait(60, check=True)
    assert "\na slow sample\nresult recipe=" in outcome.outputs[0]


def test_text_ends_with_bits_tokens_and_a_sample(tmp_path, folder):
    """The lowest value is the best: that of the last of two epochs."""
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"{number}: all work and no play\n" * 20)
    argv = ("--data", "text", "--data-dir", str(tmp_path), "--seq-len", "16", "--epochs", "2")
    path = train("ddp", folder, 2, *argv, "--global-batch-size", "16", "--warmup-steps", "0")
    text = (folder / "output-ddp-2" / "rank0.txt").read_text()
    assert "a sample of what the model writes:\n" in text
    speeds = r"samples_per_s=(\d+) tokens_per_s=(\d+)"
    result = re.search(rf"result recipe=ddp world_size=2 test_bits_per_byte=(\S+) {speeds} record=(\S+)\n$", text)
    assert result, text
    epochs = [line for line in metrics(path) if "test_loss" in line]
    assert float(result[1]) == pytest.approx(epochs[-1]["test_loss"] / math.log(2), abs=1e-4)
    assert int(result[3]) == pytest.approx(16 * int(result[2]), abs=16)
    assert Path(result[4]) == path
    best = json.loads((path / "result.json").read_text())["best_test_bits_per_byte"]
    assert best == min(line["test_bits_per_byte"] for line in epochs), "the lowest"
    assert losses(path)[-1] < losses(path)[0] < 1.1 * math.log(256)
    best = torch.load(path / "checkpoints" / "best.pt", weights_only=True)["position"]
    assert best["best_score"] == -min(line["test_bits_per_byte"] for line in epochs)


def test_pipeline_broadcasts_targets_of_any_dtype(run):
    """Gloo and NCCL know no int16."""
    argv = ("--model", "mine:plain", "--data", "mine:shorts", "--task", "mine:SquaredError", "--max-steps", "5")
    assert_same_run(run("pipeline", 2, *argv), run("single", 1, *argv))
