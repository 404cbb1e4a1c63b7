"""How each model is split over the ranks of a replica: column-wise layers, each followed by a row-wise one.

On each rank, a column-wise layer holds some rows of its weight and computes some outputs from all inputs; the
row-wise layer after it takes those outputs as inputs, and its output is the sum over the ranks. Each rank holds
all other layers whole and computes them for all tokens or, with sequence parallelism, for some of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import linear, scaled_dot_product_attention

from recipes.common.checkpoint.shard_files import Box
from recipes.common.errors import UserError
from recipes.common.models.gpt import GPT, Attention
from recipes.common.models.models import BUILT_IN_MODELS, GPT_NAMES, GPTS, LeNet
from recipes.common.models.vit import VisionTransformer
from recipes.common.parallel.sharding import map_states, names_of_parameters
from recipes.common.world.tree import Slot

PLANS: dict[type[nn.Module], dict[str, str]] = {
    LeNet: {"classifier.0": "colwise", "classifier.2": "rowwise"},
    VisionTransformer: {
        "blocks.*.self_attn.out_proj": "rowwise",
        "blocks.*.linear1": "colwise",
        "blocks.*.linear2": "rowwise",
    },
    GPT: {
        "blocks.*.attention.qkv": "colwise",
        "blocks.*.attention.project": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
    },
}

NEEDS_EVEN = torch.__version__ < "2.13"
"""Whether ranks need equal numbers of tokens: others are not contiguous once gathered, and layers need that."""

Packed = dict[str, int]
"""For each packed parameter, the rows of a rank's queries; its keys and its values have as many."""

SEQUENCE = {"embedding": "cut", "blocks.*.norm?": "tokens", "head": "gather"}
"""What --sequence-parallel adds to the plan of a model with blocks."""
VOCABULARY = {"embedding": "embedding_rowwise", "head.norm": "copy"}
"""What --loss-parallel adds to the plan of a GPT."""


def parallelize(
    model: nn.Module,
    name: str,
    mesh: DeviceMesh,
    sequence: bool = False,
    vocabulary: bool = False,
    own_plan: dict[str, str] | None = None,
) -> Packed:
    """Split the model in place; return its packed parameters (queries, keys and values in one).

    Args:
        model: an instance of one of the classes in PLANS, or one with a plan of its own.
        name: the model's name in --model.
        mesh: the ranks of a replica.
        sequence: between the split layers, a rank has some of the tokens of a DTensor (B, T, width).
        vocabulary: a rank has some rows of the embedding and, in training, some columns of the logits, a DTensor.
        own_plan: the style of each layer that is split, by its path; without it, the plan of the model's class.
    """
    ranks = mesh.size()
    if ranks == 1:
        return {}
    plan = own_plan or PLANS.get(type(model))
    if not plan:
        known = ", ".join([*BUILT_IN_MODELS, *GPTS])
        raise UserError(f"--model {name}: it has no plan of what to split; use {known}, or --tensor-parallel 1")
    layers = dict(plan)
    if sequence:
        if own_plan or not hasattr(model, "blocks"):
            fix = f"drop it, or use vit-tiny, {GPT_NAMES}"
            raise UserError(f"--sequence-parallel: --model {name} has no plan for sequences; {fix}")
        layers.update(SEQUENCE)
    if vocabulary:
        if own_plan or not isinstance(model, GPT):
            fix = f"drop it, or use {GPT_NAMES}"
            raise UserError(f"--loss-parallel: --model {name} has no plan for vocabularies; {fix}")
        layers.update(VOCABULARY)
    packed: Packed = {}
    torch.backends.mha.set_fastpath_enabled(False)  # in evaluation, the fused layer would read whole weights
    styles = make_styles(sequence)
    with kept_uses(model):
        for path, module in model.named_modules():
            if not own_plan and isinstance(module, Attention | nn.MultiheadAttention):
                packed.update(split_heads(module, path, name, mesh))
        for path, style in plan.items():
            check_layers(model, path, style, name, ranks)
        split = {path: styles[style] for path, style in layers.items()}
        # Tensor: every rank has drawn the same weights and cuts out its shards: nothing crosses the wire.
        parallelize_module(model, mesh, split, src_data_rank=None)
    if vocabulary and isinstance(model, GPT):
        model.head.register_forward_hook(whole_logits)
    return packed


@contextmanager
def kept_uses(model: nn.Module) -> Iterator[None]:
    """Let the parameters that replace the model's in this block be trained, and shared, as those were."""
    uses = [(names, model.get_parameter(names[0]).requires_grad) for names in names_of_parameters(model)]
    yield
    for (first, *others), is_trained in uses:
        parameter = model.get_parameter(first).requires_grad_(is_trained)
        for module, _, key in (other.rpartition(".") for other in others):
            setattr(model.get_submodule(module), key, parameter)


def make_styles(sequence: bool) -> dict[str, ParallelStyle]:
    """Return the style of splitting a layer for each word in the plans.

    The comments give the bytes that each of N ranks sends. A full activation has S = 4 x batch x positions x width
    bytes in fp32.
    """
    whole, tokens = Replicate(), Shard(1)
    between = tokens if sequence else whole
    # Tensor: each rank takes its part of whole inputs; an embedding looks up the tokens whose rows it has: others
    # are zero. All-reduces the sum, 2 (N-1)/N S, and all-gathers the gradient of a linear layer's inputs,
    # (N-1)/N S. With a sequence, reduce-scatters the sum, and all-gathers its gradient: (N-1)/N S each.
    from_whole = RowwiseParallel(input_layouts=whole, output_layouts=between, use_local_output=not sequence)
    return {
        # Tensor: a column-wise layer sends nothing forward, and all-reduces its inputs' gradient: 2 (N-1)/N S.
        # With a sequence, it all-gathers its inputs, and reduce-scatters their gradient: (N-1)/N S each.
        "colwise": ColwiseParallel(input_layouts=between),
        # Tensor: a row-wise layer all-reduces its output, 2 (N-1)/N S, and sends nothing back. With a sequence, it
        # reduce-scatters its output, and all-gathers the gradient: (N-1)/N S each.
        "rowwise": RowwiseParallel(output_layouts=between, use_local_output=not sequence),
        # Tensor: also all-gathers the outputs, (N-1)/N S; in backward, each rank takes its part of their gradient.
        "colwise_gather_output": ColwiseParallel(output_layouts=whole),
        "rowwise_split_input": from_whole,
        "embedding_rowwise": from_whole,
        # Tensor: a norm sends nothing. Its weights' gradient is of the rank's own tokens: train.py sums it.
        "tokens": SequenceParallel(),
        # Tensor: what a module computes from a rank's units, such as the norm of each head, sends nothing. Its
        # weights' gradient is of the rank's own units: train.py sums it. 0: any dimension that it does not mix.
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=0, use_local_output=True),
        # Tensor: each rank embeds all tokens and keeps some; all-gathers their gradient: (N-1)/N S.
        "cut": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=tokens, use_local_output=False),
        # Tensor: all-gathers the tokens, (N-1)/N S; in backward, each rank takes its part of their gradient.
        "gather": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole, use_local_output=True),
        # Tensor: each rank computes the logits of its rows of the vocabulary from the whole activation, as a
        # column-wise layer does: all-reduces the activation's gradient, 2 (N-1)/N S.
        "copy": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=whole, use_local_output=False),
    }


def whole_logits(head: nn.Module, _: Any, logits: DTensor) -> Tensor:
    """Return the logits of a GPT's head, in training as shards and in evaluation whole."""
    # Tensor: evaluation all-gathers the logits: (N-1)/N x 4 x batch x positions x vocabulary bytes.
    return logits if head.training else logits.full_tensor()


def check_tokens(model: nn.Module, length: int, ranks: int) -> None:
    """Raise UserError if --sequence-parallel would divide a sample's tokens unevenly, and torch cannot."""
    tokens = model.embedding.position.shape[1] if isinstance(model, VisionTransformer) else length
    if NEEDS_EVEN and hasattr(model, "blocks") and tokens % ranks:  # parallelize() refuses a model without blocks
        what = f"torch {torch.__version__} cannot divide {tokens} tokens by {ranks}; torch 2.13 can"
        raise UserError(f"--sequence-parallel: {what}, or use a multiple of {ranks} tokens")


def matches(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose path a pattern names; a * stands for a part between dots, as in torch's plans."""
    wanted = pattern.split(".")
    for path, module in model.named_modules():
        parts = path.split(".")
        if len(parts) == len(wanted) and all(map(fnmatch, parts, wanted)):
            yield path, module


def check_layers(model: nn.Module, pattern: str, style: str, name: str, ranks: int) -> None:
    """Raise UserError if the number of ranks does not divide a layer that is to be split and not gathered."""
    for path, module in matches(model, pattern):
        if style in ("colwise", "rowwise") and isinstance(module, nn.Linear):
            size = module.out_features if style == "colwise" else module.in_features
            if size % ranks:
                what = f"does not divide the {size} units of {name}'s {path}"
                raise UserError(f"--tensor-parallel {ranks} {what}; use a divisor of {size}")


def split_heads(attention: Attention | nn.MultiheadAttention, path: str, name: str, mesh: DeviceMesh) -> Packed:
    """Give each rank the rows of some heads; return the packed parameters.

    A packed parameter has the rows of all queries, then all keys, then all values. They are reordered so that each
    rank's rows, its heads' queries, keys and values, are contiguous.
    """
    ranks = mesh.size()
    heads: int = attention.heads if isinstance(attention, Attention) else attention.num_heads
    if heads % ranks:
        what = f"does not divide the {heads} attention heads of {name}"
        raise UserError(f"--tensor-parallel {ranks} {what}; use a divisor of {heads}")
    if isinstance(attention, Attention):
        attention.heads = heads // ranks
        attention.qkv.weight.data = swap(attention.qkv.weight.data, 3, ranks)
        return {f"{path}.qkv.weight": attention.qkv.out_features // 3 // ranks}
    for key in ("in_proj_weight", "in_proj_bias"):
        whole = swap(getattr(attention, key).data, 3, ranks)
        shards = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        setattr(attention, key, nn.Parameter(shards))
    attention.forward = partial(attend, attention, heads // ranks, mesh)  # type: ignore[method-assign]
    return dict.fromkeys((f"{path}.in_proj_weight", f"{path}.in_proj_bias"), attention.embed_dim // ranks)


def attend(
    attention: nn.MultiheadAttention, heads: int, mesh: DeviceMesh, tokens: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Compute self-attention over this rank's heads; replaces the module's forward()."""
    # Tensor: a column-wise layer that is not a separate module: see make_styles().
    if isinstance(tokens, DTensor):
        everywhere = tokens.redistribute(placements=[Replicate()])
    else:
        everywhere = DTensor.from_local(tokens, mesh, [Replicate()], run_check=False)
    packed = cast(DTensor, linear(everywhere, attention.in_proj_weight, attention.in_proj_bias)).to_local()
    # (B, T, 3 * heads * size) -> three of (B, heads, T, size)
    q, k, v = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = scaled_dot_product_attention(q, k, v)
    return attention.out_proj(mixed.transpose(1, 2).flatten(2)), None


def swap(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder rows that are `outer` x `inner` equal groups to the order `inner` x `outer`."""
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def packed_boxes(packed: Packed, ranks: int, name: str | None, box: Box) -> list[Box]:
    """Return the boxes of a rank's rows in the whole model: up to three for a packed parameter, else one."""
    if name not in packed or not box:
        return [box]
    (first, end), *columns = box
    size = packed[name]
    cuts = [first, *range((first // size + 1) * size, end, size), end]
    boxes: list[Box] = []
    for start, stop in pairwise(cuts):
        rank, part = divmod(start // size, 3)
        place = (part * ranks + rank) * size + start % size
        boxes.append(((place, place + stop - start), *columns))
    return boxes


def reorder_packed(
    content: dict[str, Any], model: nn.Module, packed: Packed, outer: int, inner: int
) -> dict[str, Any]:
    """Reorder the rows of packed parameters and of their optimizer state in a checkpoint's content or outline."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name in packed}

    def change(name: str | None, value: Any) -> Any:
        if name in shapes and isinstance(value, Slot) and (keep := value.keep):
            return value._replace(keep=lambda tensor: keep(swap(tensor, outer, inner)))
        is_packed = name in shapes and isinstance(value, Tensor) and value.shape == shapes[name]
        return swap(value, outer, inner) if is_packed else value

    return map_states(content, model, change)
