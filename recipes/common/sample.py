"""What a trained model makes at a run's end, for tasks that have a sample."""

from __future__ import annotations

import copy

from torch import nn

from recipes.common.task import Task
from recipes.common.user_code import refusal
from recipes.common.world.peers import Peers


def make_sample(task: Task, model: nn.Module, peers: Peers, exchanges: bool) -> str:
    """Return the task's sample, or a warning if sampling fails: the run is complete either way.

    Call it on rank 0, or on all ranks if the model's forward pass `exchanges` data: then it raises RuntimeErrors.
    """
    try:
        if exchanges:
            with peers.watch("sample", computes=True):
                return task.sample(model, peers.device)
        if any(p.device != peers.device for p in model.parameters()):
            model = copy.deepcopy(model).to(peers.device)  # a pipeline's layers may be on several devices
        return task.sample(model, peers.device)
    except Exception as error:
        if exchanges and isinstance(error, RuntimeError):  # perhaps a lost rank
            raise
        return f"warning: {refusal('the sample failed', error, 'the run is complete without it')}"
