"""Your own model in this recipe: ranks divide its sequences, and check that it still computes the same."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn.modules.batchnorm import _NormBase

from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.models.attention import SequenceSharding, use_sequence_sharding
from recipes.common.models.split_check import Pass, call_own, check_same_pass, one_pass, without_zeros
from recipes.common.options import Options
from recipes.common.world.agreement import run_on_all_ranks
from recipes.common.world.peers import Peers
from recipes.context.attention import shard_sequence


def check_data(args: Options, data: Data) -> None:
    """Raise UserError if the samples are not sequences of tokens, with a target for each."""
    if data.kind not in ("tokens", "bytes") or len(data.input.shape) != 1 or data.target.shape != data.input.shape:
        fix = "give sequences of ids, shape (T,), with a target for each, or use --context-parallel 1"
        raise UserError(f"--data {args.data} has {data.input}, which ranks cannot divide; {fix}")


def check_layers(model: nn.Module, args: Options) -> None:
    """Raise UserError if a layer normalises over positions in training, which check_model() does in eval()."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase):
            what = f"{name} ({type(module).__name__}) normalises each rank's positions by themselves"
            fix = "use a norm of each position, such as nn.LayerNorm, or --context-parallel 1"
            raise UserError(f"--model {args.model}: with its sequences divided, {what}; {fix}")


LONGEST = 1024
"""Positions of a longer sequence that the check takes: all of it may not fit on one device."""


def check_model(
    model: nn.Module, data: Data, args: Options, cp: DeviceMesh, sharding: SequenceSharding, peers: Peers
) -> None:
    """Raise UserError if a model's output or gradients for two samples are others once ranks divide the sequences.

    Call it on all ranks. Raises it as check_layers(), too.
    """
    run_on_all_ranks(lambda: check_layers(model, args), peers)
    chunks = 2 * cp.size()
    length = min(data.input.shape[0], max(LONGEST // chunks, 1) * chunks)
    inputs, targets = (tensor[:, :length].to(peers.device) for tensor in data.examples(2))
    what = f"--model {args.model}: with its sequences divided, it"
    fix = "let each layer that mixes positions do so by causal_attention(), and use positions()"

    def whole_gradient(own: Tensor) -> Tensor:
        # A loss is a mean over positions: over this rank's, N times what they add to the whole one.
        return DTensor.from_local(own / cp.size(), cp, [Partial()], run_check=False).full_tensor()

    def divided_pass() -> Pass:
        own = shard_sequence(inputs, cp, 1), shard_sequence(targets, cp, 1)
        with use_sequence_sharding(sharding):
            return call_own(f"{what} fails", fix, lambda: one_pass(model, own, data.task, args, whole_gradient))

    with without_zeros(model):
        whole = run_on_all_ranks(lambda: one_pass(model, (inputs, targets), data.task, args), peers)
        whole[""] = shard_sequence(whole[""], cp, 1)
        found = run_on_all_ranks(divided_pass, peers)
    run_on_all_ranks(lambda: check_same_pass(what, whole, found, args.amp, fix, fix), peers)
