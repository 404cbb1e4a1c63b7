"""Resume from a checkpoint: which parts of its content a job takes over."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from recipes.common.checkpoint.checkpoint import Position
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.optim import parameter_indices


def restore(job: Job, content: dict[str, Any]) -> None:
    """Restore a job from a checkpoint's content; raises UserError if its model or optimizer does not fit."""
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
    job.throughput.add_earlier(**content.get("timed", {}))
    job.guard.skipped = content.get("skipped_steps", 0)


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
    fix = "use the model that it is of, or start a new run without --resume"
    raise UserError(f"the checkpoint does not fit this run: {what}{count}; {fix}")


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what optimizer_state() returns without its settings: groups, decay and kernels stay this launch's.

    Raises ValueError if the number of parameters differs.
    """
    places, saved = parameter_indices(optimizer), [n for group in state["param_groups"] for n in group["params"]]
    if len(saved) != len(places):
        raise ValueError(f"its optimizer has {len(saved)} parameters, the model {len(places)}")
    numbers = iter(range(len(places)))
    groups = [{**g, "params": list(itertools.islice(numbers, len(g["params"])))} for g in optimizer.param_groups]
    own = {i: state["state"][place] for i, place in enumerate(places) if place in state["state"]}
    optimizer.load_state_dict({"state": own, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in (values or {}).items():  # None: with ZeRO, another rank updates this parameter
            # A fused kernel needs all tensors of a parameter in one memory format; the checkpoint's may differ.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def position_of(content: dict[str, Any], steps_per_epoch: int, total_steps: int) -> Position:
    """Return a checkpoint's position in a run that may be longer than the one that wrote it."""
    position = Position(**content["position"])
    if position.step < total_steps:
        # A run that --max-steps ended within an epoch counted that epoch as done; a longer run completes it.
        position.epoch = min(position.epoch, position.step // steps_per_epoch)
        # If the data set has shrunk, the steps done make more epochs: all but the last of these count as done.
        position.epoch = max(position.epoch, -(-position.step // steps_per_epoch) - 1)
    return position


def data_change_warning(before: dict[str, str], now: dict[str, str]) -> str:
    """Return a warning if the data differ from the checkpoint's, else ""; old versions did not record the data."""
    changed = [f"{half} is {now[half]} (was {old})" for half, old in before.items() if now.get(half, old) != old]
    if not changed:
        return ""
    what = f"the data have changed since the checkpoint was written: {', '.join(changed)}"
    return f"warning: {what}; the order of samples is now another one, and earlier evaluations do not compare"
