"""Optimizer, learning-rate schedule and mixed precision: each a function of the options and the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipes.common.arguments import is_user_code
from recipes.common.nonfinite import total_norm
from recipes.common.options import Options
from recipes.common.world.agreement import run_on_all_ranks
from recipes.common.world.peers import Peers

AMP_DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

OWN_ENTRIES = {"places", "lr_share"}
"""Entries of an optimizer's groups that are ours: see parameter_groups() and build_user_optimizer()."""

Clip = Callable[[list[nn.Parameter], float], Tensor]
"""Scales the gradients of parameters down to a total norm; returns the norm that they had."""


def optimizer_class(args: Options) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and the arguments of --optimizer sgd or adamw."""
    settings: dict[str, Any] = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "adamw":
        return torch.optim.AdamW, {**settings, "betas": (0.9, args.beta2)}
    return torch.optim.SGD, {**settings, "momentum": args.momentum}


def parameter_groups(args: Options, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return all parameters as one group; with --no-decay-norm-bias, norms and biases as a second without decay.

    An optimizer numbers its parameters group by group; a group's `places` are its parameters' indices among all.
    """
    numbered = list(enumerate(parameters))
    if args.decay_norm_bias:
        return [{"params": [parameter for _, parameter in numbered]}]
    # Split by dimensions, as nanoGPT and timm do: that works for shards and stages, whatever the layers' names.
    matrices = [pair for pair in numbered if pair[1].ndim > 1]
    vectors = [pair for pair in numbered if pair[1].ndim <= 1]
    return [
        {"params": [p for _, p in pairs], "places": [place for place, _ in pairs], "weight_decay": decay}
        for pairs, decay in ((matrices, args.weight_decay), (vectors, 0.0))
        if pairs
    ]


def build_optimizer(args: Options, model: nn.Module, peers: Peers) -> torch.optim.Optimizer:
    """Return SGD with momentum, AdamW, or the user's own optimizer over the model's parameters.

    Call it on all ranks. Raises UserError on all ranks as build_user_optimizer() on one.
    """
    if is_user_code(args.optimizer):
        from recipes.common.user_code import build_user_optimizer

        return run_on_all_ranks(lambda: build_user_optimizer(args, model), peers)
    make, settings = optimizer_class(args)
    parameters = list(model.parameters())
    meshes = {getattr(p, "device_mesh", None) for p in parameters}
    can_fuse = meshes == {None} or (len(meshes) == 1 and args.optimizer == "adamw")
    if can_fuse and any(p.is_cuda for p in parameters) and all(p.is_floating_point() for p in parameters):
        # A fused kernel updates all parameters and reads the loss scaler's result on the GPU: the host need not
        # wait. There is none for complex numbers, and for shards (DTensor, with a mesh) only AdamW's, if all have
        # the same mesh. A pipeline's other stages stay on the CPU.
        settings["fused"] = True
    return make(parameter_groups(args, parameters), **settings)


def parameter_indices(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return, in the optimizer's order, the index of each parameter among those that it was built from."""
    places = [group.get("places", range(len(group["params"]))) for group in optimizer.param_groups]
    return [place for own in places for place in own]


def optimizer_state(optimizer: torch.optim.Optimizer, content: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state dict (default: the optimizer's) in the form of checkpoints.

    That is one group of all parameters, in the model's order. The user's own optimizer keeps its groups.
    """
    content, places = content or optimizer.state_dict(), parameter_indices(optimizer)
    groups = [{n: value for n, value in g.items() if n not in OWN_ENTRIES} for g in content["param_groups"]]
    state = sorted((places[number], values) for number, values in content["state"].items())
    if is_users(optimizer):
        for group in groups:
            group["params"] = [places[number] for number in group["params"]]
    else:
        groups = [{**groups[0], "params": sorted(places)}]
    return {"state": dict(state), "param_groups": groups}


def is_users(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is the user's own."""
    return "lr_share" in optimizer.param_groups[0]


def learning_rate(args: Options, step: int, total_steps: int, warmup_steps: int) -> float:
    """Return the rate of an optimizer step, counted from 0: linear warm-up, then cosine, linear or constant.

    --scale-lr is the linear scaling rule of Goyal et al. 2017, https://arxiv.org/abs/1706.02677: the rate then
    depends on the global batch. It never depends on the number of processes.
    """
    peak = args.lr * (args.global_batch_size / 256 if args.scale_lr else 1.0)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if args.lr_schedule == "constant":
        return peak
    share = (step - warmup_steps) / (total_steps - warmup_steps)
    left = 1 - share if args.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * share))
    return peak * (args.min_lr_share + (1 - args.min_lr_share) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group; each may have its own share of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_share", 1.0)


def autocast(args: Options, device: torch.device) -> torch.autocast:
    """Return the mixed-precision context of --amp (one that does nothing for `none`)."""
    return torch.autocast(device.type, dtype=AMP_DTYPES[args.amp], enabled=args.amp != "none")


def build_scaler(args: Options, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler that fp16 needs; for other precisions, a disabled one that changes nothing."""
    return torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")


def fill_momentum(optimizer: torch.optim.Optimizer, may_skip: bool) -> None:
    """Set the momentum that a fused SGD has not got yet to zeros, which is the same as none.

    Fused SGD takes the momentum of all parameters or of none: it fails if a parameter gets its first gradient in a
    later step, as in a branch that is drawn or a layer that was frozen. `may_skip`: the scaler may skip a step.
    Fused SGD would allocate its momentum in the first step, and not write it: the next step would add memory that
    nobody has written.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum"):
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            without = [p for p in given if optimizer.state.get(p, {}).get("momentum_buffer") is None]
            for parameter in without if may_skip or len(without) < len(given) else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def densify_gradients(args: Options, parameters: Iterable[nn.Parameter]) -> None:
    """Make sparse gradients dense on GPUs, or if there is momentum.

    On GPUs, SGD's fused kernel takes no sparse ones. Momentum is dense in a checkpoint; a sparse one would also
    grow with each step: SGD appends the rows of every gradient.
    """
    for parameter in parameters if args.takes_sparse_gradients else ():
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and (args.momentum or gradient.is_cuda):
            parameter.grad = gradient.to_dense()


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Do the same as nn.utils.clip_grad_norm_(), for sparse gradients, too."""
    norm = total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def optimizer_step(
    args: Options,
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    check: Callable[[Sequence[Tensor]], bool],
    clip: Clip = clip_gradients,
) -> Tensor | None:
    """Unscale and clip the gradients, step if check(gradients) returns true, and clear them.

    Return the norm of the gradients before they were clipped; None if they are not.
    An enabled scaler does not call check(): it skips a step with non-finite gradients by itself, and lowers the
    scale.
    """
    parameters = list(parameters)
    densify_gradients(args, parameters)
    fill_momentum(optimizer, may_skip=scaler.is_enabled())
    norm = None
    if args.clip_grad_norm:
        scaler.unscale_(optimizer)  # clip by the norm of the unscaled gradient
        norm = clip(parameters, args.clip_grad_norm)
        gradients = [norm]  # finite only if all gradients are
    else:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if scaler.is_enabled() or check(gradients):
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm
