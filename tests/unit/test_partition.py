"""Cutting a model into parts: the best cuts, and layers that make up the whole."""

import functools
import itertools
import random

import pytest
import torch

from recipes.common.data import Data, TensorSplit
from recipes.common.errors import UserError
from recipes.common.models.layers import layers
from recipes.common.models.models import build_model
from recipes.common.models.user_model import check_sequence
from recipes.common.optim import build_optimizer
from recipes.common.options import Options, parse
from recipes.common.restore import load_optimizer_state
from recipes.pipeline.partition import (
    Part,
    PartModule,
    balanced_cuts,
    check_repeated,
    merge_states,
    own_state,
    plan_parts,
    state_of,
)
from tests.tiny import ALONE


def options(model, *words):
    return parse(Options, "test", None, ["--model", model, *words])


def data_of(channels, image_size):
    images = torch.zeros(4, channels, image_size, image_size, dtype=torch.uint8)
    split = TensorSplit(images, torch.arange(4), torch.zeros(channels), torch.ones(channels))
    return Data.of_images(split, split, channels, image_size, num_classes=10)


def test_no_other_cuts_have_a_smaller_largest_part():
    draw = random.Random(0)
    for _ in range(200):
        costs = [float(draw.randint(0, 9)) for _ in range(draw.randint(1, 8))]
        parts = draw.randint(1, len(costs))
        bounds = balanced_cuts(costs, parts)
        assert bounds[0] == 0
        assert bounds[-1] == len(costs)
        assert all(a < b for a, b in itertools.pairwise(bounds))
        best = min(
            max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
            for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
        )
        assert max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds)) == best


MODELS = [
    *(("lenet", 1, 8), ("lenet", 1, 28), ("lenet", 3, 32)),
    *(("vit-tiny", 1, size) for size in (2, 8, 28, 97)),
    *(("vit-tiny", 3, 32), ("vit-tiny", 3, 224), ("resnet18", 3, 32), ("resnet18", 1, 28)),
]


@pytest.mark.parametrize(("name", "channels", "image_size"), MODELS)
def test_layers_in_order_equal_the_model(name, channels, image_size):
    data = data_of(channels, image_size)
    model = build_model(options(name), data).eval()
    sequence = layers(model)
    inputs = outputs = torch.randn(2, channels, image_size, image_size)
    with torch.no_grad():
        for _, module in sequence:
            outputs = module(outputs)
        assert torch.equal(outputs, model(inputs))
    names = [f"{layer}.{key}" for layer, module in sequence for key in module.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    assert outputs.shape == (2, 10)


@pytest.mark.parametrize("balance", ["parameters", "cost"])
@pytest.mark.parametrize(("name", "parts"), [("lenet", 2), ("lenet", 5), ("vit-tiny", 4), ("resnet18", 3)])
def test_parts_equal_the_model_and_each_has_parameters(name, parts, balance):
    args, data = options(name), data_of(3, 32)
    model = build_model(args, data)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    inputs = torch.randn(2, 3, 32, 32)
    plan = plan_parts(model, parts, balance, args, inputs)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert len(plan) == parts
    assert all(part.num_parameters for part in plan)
    assert sum(part.num_parameters for part in plan) == sum(p.numel() for p in model.parameters())
    assert sum(part.cost_share for part in plan) == pytest.approx(1)
    outputs = inputs
    model.eval()
    with torch.no_grad():
        for part in plan:
            outputs = PartModule(model, part, args, torch.device("cpu"))(outputs)
            assert (outputs.shape[1:], outputs.dtype) == (part.output_shape, part.output_dtype)
        assert torch.equal(outputs, model(inputs))


@pytest.mark.parametrize("balance", ["parameters", "cost"])
def test_frozen_layers_make_no_part_of_their_own(balance):
    """A part without trainable weights could neither compute a gradient nor send one back."""
    args = options("vit-tiny")
    model = build_model(args, data_of(3, 32))
    for frozen in (model.embedding, *model.blocks[:4]):
        frozen.requires_grad_(False)
    plan = plan_parts(model, 3, balance, args, torch.zeros(1, 3, 32, 32))
    assert [part.names[0] for part in plan] == ["embedding", "blocks.5", "head.1"]
    with pytest.raises(UserError, match=r"cannot be cut into 5 parts, .*; use at most 4"):
        plan_parts(model, 5, balance, args, torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("owned", [[[0], [1], [2], [3]], [[0, 2], [1, 3]]], ids=["contiguous", "interleaved"])
def test_the_state_cut_into_shares_and_merged_is_the_same(optimizer, owned):
    args, data = options("lenet", "--optimizer", optimizer), data_of(1, 8)
    model = build_model(args, data)
    whole = build_optimizer(args, model, ALONE)
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    whole.step()
    content = {"model": model.state_dict(), "optimizer": whole.state_dict()}
    other = build_model(args, data)
    other.load_state_dict(content["model"])
    parts = plan_parts(other, 4, "parameters", args, torch.zeros(1, 1, 8, 8))
    states = []
    for numbers in owned:
        modules = [PartModule(other, parts[number], args, torch.device("cpu")) for number in numbers]
        mine = build_optimizer(args, other, ALONE)
        load_optimizer_state(mine, own_state(content, other, modules)["optimizer"])
        states.append(state_of(modules, other, mine))
        assert len(states[-1][1]) == sum(1 for module in modules for _ in module.parameters())
    merged = merge_states(states, other, mine)
    expected = content["optimizer"]
    assert merged["param_groups"] == expected["param_groups"]
    assert merged["state"].keys() == expected["state"].keys()
    for place, values in expected["state"].items():
        assert values.keys() == merged["state"][place].keys()
        assert all(torch.equal(value, merged["state"][place][key]) for key, value in values.items())


class Counted(torch.nn.Linear):
    """A layer with a state that is not a tensor."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_a_share_has_what_a_layer_keeps_beside_tensors():
    args, cpu = options("lenet"), torch.device("cpu")
    model, other = (torch.nn.Sequential(Counted(2, 2), torch.nn.Linear(2, 2)) for _ in range(2))
    model[0].calls = 3
    parts = [Part([name], 6, 0.5, (2,), torch.float32) for name in ("0", "1")]
    optimizer = build_optimizer(args, model, ALONE)
    states = [state_of([PartModule(model, part, args, cpu)], model, optimizer) for part in parts]
    merge_states(states, other, optimizer)
    assert other[0].calls == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_refuses_what_cannot_be_cut():
    """The forward() of a user's class may do more than torchvision's of the same name: a functional ReLU."""
    data = data_of(3, 32)
    lenet = build_model(options("lenet"), data)
    with pytest.raises(UserError, match=r"cannot be cut into 6 parts, .*; use at most 5"):
        plan_parts(lenet, 6, "parameters", options("lenet"), torch.zeros(1, 3, 32, 32))
    mobile = build_model(options("mobilenet_v2"), data)
    with pytest.raises(UserError, match="MobileNetV2 is not a plain sequence of layers"):
        layers(mobile)
    own = type("ResNet", (torch.nn.Module,), {"__module__": "mine"})()
    own.conv1, own.fc = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 10)
    with pytest.raises(UserError, match="--model: ResNet is not a plain sequence of layers"):
        layers(own)


class Last(torch.nn.Module):
    """The output of an LSTM at the last position."""

    def forward(self, outputs):
        return outputs[0][:, -1]


def test_a_layer_that_returns_a_tuple_is_refused():
    model = torch.nn.Sequential(torch.nn.LSTM(2, 4, batch_first=True), Last(), torch.nn.Linear(4, 2))
    message = "--model mine:net: its layer LSTM returns a tuple, and a pipeline sends one tensor .*; make one"
    with pytest.raises(UserError, match=message):
        plan_parts(model, 2, "parameters", options("mine:net"), torch.zeros(1, 3, 2))


def test_no_cut_falls_between_layers_whose_rows_are_not_samples():
    """A stage would wait for a row of each sample, and gloo would abort it."""
    rows = (torch.nn.Flatten(0, 1), torch.nn.Linear(2, 9), torch.nn.Linear(9, 2), torch.nn.Unflatten(0, (-1, 3)))
    model = torch.nn.Sequential(*rows, torch.nn.Flatten(), torch.nn.Linear(6, 2))
    plan = functools.partial(plan_parts, model, balance="parameters", args=options("mine:net"))
    parts = plan(2, sample=torch.zeros(1, 3, 2))
    assert [part.names for part in parts] == [["0", "1", "2", "3", "4"], ["5"]]
    with pytest.raises(UserError, match=r"into 3 parts, each from a layer that .* each sample; use at most 2"):
        plan(3, sample=torch.zeros(1, 3, 2))


class Residual(torch.nn.Sequential):
    """A sequence whose forward() does more."""

    def forward(self, inputs):
        return inputs + super().forward(inputs)


def test_a_layer_that_occurs_again_is_applied_again_and_a_sequence_with_its_own_forward_is_one_layer():
    act = torch.nn.Tanh()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), act, torch.nn.Linear(2, 2), act)
    assert [name for name, _ in layers(model)] == ["0", "1", "2", "3"]
    assert layers(model)[3][1] is act
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Residual(torch.nn.Linear(2, 2), torch.nn.Tanh()))
    assert [name for name, _ in layers(model)] == ["0", "1"]
    with pytest.raises(UserError, match="--model: Residual is not a plain sequence of layers and cannot be split"):
        layers(Residual(torch.nn.Linear(2, 2)))


def test_a_sequence_with_a_hook_is_refused():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.Dropout())
    check_sequence(model, options("mine:net"), data_of(1, 8))
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(UserError, match="do not return what it does; remove its hooks, or use a recipe that does"):
        check_sequence(model, options("mine:net"), data_of(1, 8))


def test_a_sequence_with_a_backward_hook_is_refused():
    """A pipeline runs its layers alone."""
    inner = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    model = torch.nn.Sequential(inner, torch.nn.Linear(10, 10))
    inner[1].register_full_backward_hook(lambda *_: None)
    check_sequence(model, options("mine:net"), data_of(1, 8))
    inner.register_full_backward_hook(lambda *_: None)
    with pytest.raises(
        UserError, match="--model mine:net: a sequence has a backward hook, and a pipeline runs only"
    ):
        check_sequence(model, options("mine:net"), data_of(1, 8))


def test_a_layer_with_statistics_or_on_two_devices_cannot_be_in_two_parts():
    args, linear, norm = options("mine:net"), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    for again, has_devices, message in (
        (norm, False, "--model mine:net: 1 and 3 are one layer in two parts, whose buffers, .*; make two layers"),
        (linear, True, "--model mine:net: 1 and 3 are one layer in two parts, on two devices; make two layers"),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), again, torch.nn.Linear(2, 2), again)
        one, two = (plan_parts(model, count, "parameters", args, torch.zeros(1, 2)) for count in (1, 2))
        check_repeated(model, one, args, has_devices)
        with pytest.raises(UserError, match=message):
            check_repeated(model, two, args, has_devices)
