"""apex.amp: initialize, scale_loss, master_params and the state of the loss scale.

It repeats what a caller can trip over: initialize() comes once and before DDP, zero_grad() takes no arguments
under O2, masters appear at the first zero_grad() or backward, a delayed unscale leaves gradients where they are,
an overflow puts a no-op in place of the next step(), O1 refuses to add float32 to float64.
"""

import contextlib
import types

import torch
from apex import EVENTS
from torch.nn.modules.batchnorm import _BatchNorm

HALF = torch.bfloat16


class State:
    level = ""
    scale = 1.0
    unskipped = 0
    halves: list = []  # noqa: RUF012
    masters: list = []  # noqa: RUF012


def initialize(model, optimizer, opt_level, verbosity):
    assert not State.level, "initialize() comes once"
    assert not type(model).__name__.startswith("Distributed"), "initialize() comes before DDP"
    EVENTS.append(f"initialize {opt_level}")
    State.level = opt_level
    State.scale = 2.0**16 if opt_level in ("O1", "O2") else 1.0
    if opt_level in ("O2", "O3"):
        for module in model.modules():
            if opt_level == "O3" or not isinstance(module, _BatchNorm):
                module._apply(lambda tensor: tensor.to(HALF), recurse=False)
        forward = model.forward
        model.forward = lambda images: forward(images.to(HALF)).float()
        model._register_state_dict_hook(_give_float)
    if opt_level == "O1":
        forward = model.forward

        def cast(images):
            with torch.autocast("cpu", dtype=HALF):
                return forward(images)

        model.forward = cast
        torch.Tensor.__iadd__ = _add_same_types
    if opt_level == "O2":
        step = optimizer.step

        def zero_grad(self):
            _make_masters(self)
            for half, master in zip(State.halves, State.masters, strict=True):
                half.grad = master.grad = None

        def step_and_round(self):
            step()
            with torch.no_grad():
                for half, master in zip(State.halves, State.masters, strict=True):
                    half.copy_(master)

        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)
        optimizer.step = types.MethodType(step_and_round, optimizer)
    return model, optimizer


_add = torch.Tensor.__iadd__


def _add_same_types(self, other):
    kinds = {x.dtype for x in (self, other) if isinstance(x, torch.Tensor) and x.is_floating_point()}
    assert len(kinds) <= 1, f"O1 knows no type for the sum of {kinds}"
    return _add(self, other)


def _give_float(module, state, prefix, metadata):
    for name, tensor in state.items():
        if tensor.dtype == HALF:
            state[name] = tensor.float()


def _make_masters(optimizer):
    if State.masters:
        return
    for group in optimizer.param_groups:
        masters = [half.detach().clone().float().requires_grad_() for half in group["params"]]
        State.halves = [*State.halves, *group["params"]]
        State.masters = [*State.masters, *masters]
        group["params"] = masters


@contextlib.contextmanager
def scale_loss(loss, optimizer, delay_unscale=False):
    EVENTS.append(f"scale_loss delay_unscale={delay_unscale}")
    yield loss.float() * State.scale
    if delay_unscale:
        return
    if State.level == "O2":
        for half, master in zip(State.halves, State.masters, strict=True):
            master.grad = half.grad.float() / State.scale
    else:
        for parameter in master_params(optimizer):
            parameter.grad /= State.scale
    is_dynamic = State.level in ("O1", "O2")
    if is_dynamic and not all(p.grad.isfinite().all() for p in master_params(optimizer)):
        State.scale, State.unskipped = State.scale / 2, 0
        step = optimizer.step

        def skip():
            optimizer.step = step

        optimizer.step = skip
        return
    State.unskipped += 1


def master_params(optimizer):
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict():
    EVENTS.append("state_dict")
    return {"loss_scaler0": {"loss_scale": State.scale, "unskipped": State.unskipped}}


def load_state_dict(state):
    EVENTS.append("load_state_dict")
    State.scale, State.unskipped = state["loss_scaler0"]["loss_scale"], state["loss_scaler0"]["unskipped"]
