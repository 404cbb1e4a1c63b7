"""The blocks of a model, and what a rank keeps of them for backward."""

import pytest
import torch
from torch import nn

from recipes.common.data import load_data
from recipes.common.models.blocks import blocks, checkpoint_blocks
from recipes.common.models.models import build_model
from recipes.single.train import options
from tests.conftest import refused
from tests.support import ROOT

CPU = torch.device("cpu")
AGAIN = ["--activation-checkpointing"]
GPT = ["--data", "text", "--data-dir", str(ROOT / "docs"), "--seq-len", "64"]


def built(*argv):
    args = options(argv)
    return build_model(args, load_data(args, CPU, print))


def test_blocks_are_the_children_of_the_outermost_sequences():
    assert [type(block).__name__ for block in blocks(built(*GPT))] == ["Block"] * 4
    assert sum(1 for block in blocks(built()) if any(True for _ in block.parameters())) == 5


def test_a_block_of_several_sequences_is_one_block():
    """FSDP refuses to shard a module twice."""
    shared, own = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleDict({"encoder": nn.ModuleList([shared]), "decoder": nn.ModuleList([own, shared])})
    assert blocks(model) == [shared, own]


def bytes_kept(model, tokens):
    """Return the bytes of activations that a forward pass keeps for backward, and the gradients."""
    own, kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}, {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(tokens)
    output.sum().backward()
    nbytes = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    return nbytes, [parameter.grad for parameter in model.parameters()]


def test_a_block_that_runs_again_keeps_its_input_alone():
    tokens = torch.arange(128).view(2, 64)
    whole = bytes_kept(built(*GPT), tokens)
    model = built(*GPT)
    checkpoint_blocks(model, options(AGAIN))
    again = bytes_kept(model, tokens)
    assert again[0] < 0.5 * whole[0]
    assert all(torch.equal(one, other) for one, other in zip(again[1], whole[1], strict=True))


def test_dropout_draws_the_same_numbers_again():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    model, found = nn.Sequential(layer), []
    for argv in ([], AGAIN):
        checkpoint_blocks(model, options(argv))
        torch.manual_seed(0)
        model.zero_grad()
        model(torch.ones(2, 3, 8)).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
            "has batch norm, and blocks that run again would count",
        ),
        (nn.Linear(8, 8), "has no blocks with parameters, which are what an nn.Sequential or nn.ModuleList"),
    ],
)
def test_a_model_without_blocks_that_can_run_again_is_refused(model, message):
    with refused(f"--activation-checkpointing: --model lenet {message}"):
        checkpoint_blocks(model, options(AGAIN))
