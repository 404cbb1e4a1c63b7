"""Your own model in this recipe: ranks divide its sequences, and check that it still computes the same."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.models.split_check import check_same_pass, one_pass
from recipes.common.options import Options
from recipes.common.user_code import refusal
from recipes.common.world.agreement import run_on_all_ranks
from recipes.common.world.peers import Peers
from recipes.context.attention import divide_sequences, own_part


def check_data(args: Options, data: Data) -> None:
    """Raise UserError if the samples are no sequences of tokens, with a target for each."""
    if data.kind not in ("tokens", "bytes") or len(data.input.shape) != 1 or data.target.shape != data.input.shape:
        fix = "give sequences of ids, shape (T,), with a target for each, or use --context-parallel 1"
        raise UserError(f"--data {args.data} has {data.input}, which ranks cannot divide; {fix}")


def divide_model(model: nn.Module, data: Data, args: Options, cp: DeviceMesh, peers: Peers) -> None:
    """Let the ranks of a replica divide the sequences that the model gets; call it on all ranks.

    Raises UserError if its output or gradients for two samples are then not those of the whole model.
    """
    inputs, targets = (tensor.to(peers.device) for tensor in data.examples(2))
    whole = run_on_all_ranks(lambda: one_pass(model, (inputs, targets), data.task, args), peers)
    whole[""] = own_part(whole[""], cp, 1)
    divide_sequences(cp)
    what = f"--model {args.model}: with its sequences divided, it"
    fix = "let each layer that mixes positions do so by causal_attention(), and use positions()"

    def whole_gradient(own: Tensor) -> Tensor:
        # A loss is a mean over positions: over this rank's, N times what they add to the whole one.
        return DTensor.from_local(own / cp.size(), cp, [Partial()], run_check=False).full_tensor()

    def check() -> None:
        own = own_part(inputs, cp, 1), own_part(targets, cp, 1)
        try:
            parts = one_pass(model, own, data.task, args, whole_gradient)
        except RuntimeError as error:
            raise refusal(f"{what} fails", error, fix) from error
        check_same_pass(what, whole, parts, args.amp, fix, fix)

    run_on_all_ranks(check, peers)
