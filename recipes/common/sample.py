"""What a trained model makes at a run's end, for tasks that have a sample."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import nn

from recipes.common.task import Task
from recipes.common.user_code import refusal
from recipes.common.world.agreement import wait_for_all
from recipes.common.world.peers import Peers

MAX_TIMEOUTS = 10
"""Times --timeout-s that a sample may take: on a CPU, 256 tokens of a large model need more than one."""


def make_sample(task: Task, model: nn.Module, peers: Peers, exchanges: bool, timeout_s: float) -> str:
    """Return the task's sample on rank 0, or a warning if sampling fails: the run is complete either way.

    Call it on all ranks. If the model's forward pass `exchanges` data, all sample, and RuntimeErrors are raised.
    Otherwise rank 0 samples in a thread, and keeps the others from taking that for a hang.
    """

    def sample_here() -> str:
        try:
            whole = model
            if not exchanges and any(p.device != peers.device for p in model.parameters()):
                whole = copy.deepcopy(model).to(peers.device)  # a pipeline's layers may be on several devices
            with torch.compiler.set_stance("force_eager"):  # a single sample would be compiled again
                return task.sample(whole, peers.device)
        except Exception as error:
            if exchanges and isinstance(error, RuntimeError):  # perhaps a lost rank
                raise
            return f"warning: {refusal('the sample failed', error, 'the run is complete without it')}"

    if exchanges:
        with peers.watch("sample", computes=True, timeouts=MAX_TIMEOUTS):
            return sample_here()
    if peers.world_size == 1:
        return sample_here()
    own = [ThreadPoolExecutor(1).submit(sample_here)] if peers.rank == 0 else []
    wait_for_all(
        lambda bound_s: not wait(own, bound_s).not_done, peers, timeout_s, MAX_TIMEOUTS * timeout_s, "sample"
    )
    return own[0].result() if own else ""
