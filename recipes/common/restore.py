"""Begin from a checkpoint or from weights: which parts of their content a job takes over."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from recipes.common.checkpoint.checkpoint import Position
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.models.models import build_model
from recipes.common.optim import is_users, parameter_indices
from recipes.common.world.peers import local_tensor


def restore(job: Job, content: dict[str, Any]) -> None:
    """Restore a job from a checkpoint's content; raises UserError if its model or optimizer does not fit.

    What fit_weights() returns is only the model: the job begins at step 0, with a new optimizer.
    """
    if "taken" in content:
        job.model.load_state_dict(content["model"])
        return
    try:
        job.model.load_state_dict(content["model"])
        load_optimizer_state(job.optimizer, content["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        check_shapes(job, content["model"])
        reason = " ".join(str(error).split())
        raise UserError(f"the checkpoint does not fit this run: {reason[:200]}") from None
    if content["scaler"]:
        job.scaler.load_state_dict(content["scaler"])
    job.position = position_of(content, job.steps_per_epoch, job.total_steps)
    if text := data_change_warning(content.get("data", {}), job.data.fingerprints):
        job.say(text)
    before = content.get("code", {})
    if changed := [name for name, own in job.code.items() if before.get(name, own) != own]:
        job.say(f"warning: code has changed since the checkpoint was written: {', '.join(sorted(changed))}")
    if job.position.best_score > -math.inf and (text := best_change(job, content)):
        job.position.best_score = -math.inf
        job.say(f"warning: best.pt was {text}")
    job.throughput.add_earlier(**content.get("timed", {}))
    job.guard.skipped = content.get("skipped_steps", 0)


WRAPPERS = ("module.", "_orig_mod.", "module.")
"""Prefixes that DDP and torch.compile give to all names, in either order."""


def fit_weights(job: Job, content: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return only weights as a checkpoint's `model` that fits --model; return any other content unchanged.

    A model on the CPU loads them, so that it translates the names of its older versions itself, and what does not
    fit keeps the initial values of --seed. Raises UserError if no parameter fits, or one is quantized.
    """
    if content is None or "position" in content:
        return content
    state, path = content["model"], job.record.weights if job.record else None
    model = build_model(job.args, job.data, job.device)
    own = model.state_dict(keep_vars=True)
    for prefix in WRAPPERS:
        if not own.keys() & state.keys():
            consume_prefix_in_state_dict_if_present(state, prefix)
    if name := next((name for name in own if is_quantized(own[name], state.get(name))), ""):
        what = f"{name} is quantized ({state[name].dtype}); dequantize the weights first"
        raise UserError(f"--weights {path}: {what}")
    shapes, saved = ({name: tuple(getattr(v, "shape", ())) for name, v in d.items()} for d in (own, state))
    reshaped = [name for name in own if name in state and shapes[name] != saved[name]]
    for name in reshaped:
        del state[name]
    try:
        missing, unknown = model.load_state_dict(state, strict=False)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"--weights {path}: {' '.join(str(error).split())[:200]}") from None
    if {name for name, _ in model.named_parameters(remove_duplicate=False)} <= set(missing):
        (there, has), (here, needs) = (next(iter(d.items())) for d in (saved, shapes))
        what = f"it begins with {there} {has}, --model {job.args.model} with {here} {needs}"
        raise UserError(f"--weights {path}: no parameter has the name and shape of one there: {what}")
    # A tied parameter has several names, and one is enough.
    taken = {id(value) for name, value in own.items() if name not in missing}
    missing = [name for name in missing if name in own and id(own[name]) not in taken]
    text = f"took {len(own) - len(missing)} of {len(own)} tensors from {path}"
    lacked = [name for name in missing if name not in reshaped]
    for what, names in (("of another shape", reshaped), ("missing there", lacked), ("unknown here", unknown)):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            text += f"; {what}: {', '.join(names[:4])}{more}"
    if changed := class_change(content.get("classes"), job.data.fingerprints.get("classes")):
        text += f"\nwarning: {path} was trained on other classes: {changed}"
    return {"model": model.state_dict(), "optimizer": {"state": {}}, "taken": text}


def is_quantized(own: Any, saved: Any) -> bool:
    """Return whether a parameter was saved as int8, float8 or the like, whose scales have other names."""
    if not (isinstance(own, Parameter) and own.is_floating_point() and own.itemsize > 1):
        return False
    if not isinstance(saved, Tensor) or saved.is_complex():
        return False
    return saved.itemsize == 1 or not saved.is_floating_point()


def check_shapes(job: Job, state: dict[str, Any]) -> None:
    """Raise UserError, with the first tensor that differs, if the tensors do not fit the model."""
    own = job.model.state_dict()
    shapes, saved = ({n: tuple(v.shape) for n, v in d.items() if isinstance(v, Tensor)} for d in (own, state))
    wrong = [name for name in {**saved, **shapes} if shapes.get(name) != saved.get(name)]
    if not wrong:
        return
    there, here = (f"{d[wrong[0]]}" if wrong[0] in d else "missing" for d in (saved, shapes))
    what = f"{wrong[0]} is {there} there, and {here} in --model {job.args.model}"
    count = f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
    fix = "use the model that it is of, or start a new run from step 0"
    raise UserError(f"the checkpoint does not fit this run: {what}{count}; {fix}")


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what optimizer_state() returns without its settings: groups, decay and kernels stay this launch's.

    Only the user's own optimizer gets its groups' settings, too, but for --weight-decay: some keep state there.
    Raises ValueError if the number of parameters, or for the user's the groups, differ.
    """
    places, saved = parameter_indices(optimizer), [n for group in state["param_groups"] for n in group["params"]]
    if len(saved) != len(places):
        raise ValueError(f"its optimizer has {len(saved)} parameters, the model {len(places)}")
    numbers = iter(range(len(places)))
    groups = [{**g, "params": list(itertools.islice(numbers, len(g["params"])))} for g in optimizer.param_groups]
    if is_users(optimizer):
        if saved != places or len(groups) != len(state["param_groups"]):
            raise ValueError("its optimizer has other groups of parameters")
        for group, settings in zip(groups, state["param_groups"], strict=True):
            group |= {name: value for name, value in settings.items() if name not in ("params", "weight_decay")}
    own = {i: state["state"][place] for i, place in enumerate(places) if place in state["state"]}
    optimizer.load_state_dict({"state": own, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in (values or {}).items():  # None: with ZeRO, another rank updates this parameter
            # A fused kernel needs all tensors of a parameter in one memory format; the checkpoint's may differ.
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if local_tensor(value).stride() != local_tensor(parameter).stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def position_of(content: dict[str, Any], steps_per_epoch: int, total_steps: int) -> Position:
    """Return a checkpoint's position in a run that may be longer than the one that wrote it."""
    position = Position(**content["position"])
    is_evaluated = position.evaluated_step == position.step
    if position.step < total_steps:
        # A run that --max-steps ended within an epoch counted that epoch as done; a longer run completes it.
        position.epoch = min(position.epoch, position.step // steps_per_epoch)
        is_evaluated = False
    # If the data set has shrunk, the steps done make more epochs: all but the last of these count as done, and the
    # last if there are no more steps to do, and these are evaluated.
    position.epoch = max(position.epoch, -(-position.step // steps_per_epoch) - (not is_evaluated))
    return position


def class_change(before: Sequence[str] | None, now: Sequence[str] | None) -> str:
    """Return the first of as many classes whose name has changed, else ""; old versions did not record names.

    Of another number of classes, the head has another shape.
    """
    pairs = zip(before or (), now or (), strict=True) if len(before or ()) == len(now or ()) else ()
    changed = ((number, old, new) for number, (old, new) in enumerate(pairs) if new != old)
    number, old, new = next(changed, (0, "", ""))
    return f"class {number} is {new!r} (was {old!r})" if new else ""


def best_change(job: Job, content: dict[str, Any]) -> str:
    """Return what best.pt was chosen by if scores do not compare with a checkpoint's, and what it is by now."""
    if (best := content.get("best", job.best)) != job.best:
        return f"the checkpoint of the {best}; from here on, it is that of the {job.best}"
    now = job.data.fingerprints.get("the test set")
    if content.get("data", {}).get("the test set", now) != now:
        return "chosen on another test set; from here on, it is chosen on this one"
    return ""


def data_change_warning(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a warning if the data differ from the checkpoint's, else ""; old versions did not record the data."""
    splits = {name: old for name, old in before.items() if name != "classes"}
    changed = [f"{name} is {now[name]} (was {old})" for name, old in splits.items() if now.get(name, old) != old]
    changed += filter(None, [class_change(before.get("classes"), now.get("classes"))])
    if not changed:
        return ""
    what = f"the data have changed since the checkpoint was written: {', '.join(changed)}"
    means = "samples have another order now, labels may stand for other classes"
    return f"warning: {what}; {means}, and earlier evaluations do not compare"
