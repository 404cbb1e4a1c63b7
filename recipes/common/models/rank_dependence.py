"""What makes a run's losses depend on the number of processes, and the warnings about it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from recipes.common.arguments import is_user_code
from recipes.common.data.splits import digest
from recipes.common.job import Job
from recipes.common.options import HOOKED
from recipes.common.seeding import seed_step
from recipes.common.world.agreement import run_on_all_ranks
from recipes.common.world.peers import Peers, local_tensor


def warnings_before_training(job: Job) -> Iterator[str]:
    """Yield what the layers show, and the checks of a user's model; some texts are empty."""
    model = job.model
    mixes_samples = job.batch_parts > 1 and getattr(model, "mixes_samples", False)
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    # With --batchnorm-group, no batch norm does (a pipeline groups its parts' layers, not job.model's).
    if layers and not job.args.batchnorm_group:
        from recipes.common.models import batchnorm

        yield (text := batchnorm.warning(model, job.args, job.batch_parts))
        # Batch norm without running statistics mixes the samples of an evaluation, too.
        mixes_samples &= not text or all(layer.running_mean is not None for layer in layers)
    if mixes_samples:
        what = "your model's output for a sample depends on the other samples of its batch"
        yield f"warning: {what}, so losses and metrics depend on the number of processes"
    parts = job.batch_parts * job.ranks_per_sample
    if parts > 1 and (hooked := getattr(model, HOOKED, None)):
        what = f"the gradient hook of {hooked[0]} gets the gradient of each of {parts} parts of the batch"
        yield f"warning: {what}, so losses depend on the number of processes unless the hook is linear"
    if job.peers.world_size * len(job.devices) > 1:
        yield dropout_warning(model)
    if job.replicas * job.ranks_per_sample > 1 and is_user_code(job.args.model):
        yield max_norm_warning(model)


def dropout_warning(model: nn.Module) -> str:
    """Return a warning if dropout makes the losses depend on the number of ranks, else ""."""
    if not any(map(draws_random_numbers, model.modules())):
        return ""
    return "warning: dropout draws other numbers on each rank, so losses depend on the number of processes"


def draws_random_numbers(module: nn.Module) -> bool:
    """Return whether a layer draws random numbers: dropout, stochastic depth, attention or an RNN with dropout."""
    if isinstance(module, _DropoutNd) or type(module).__name__ == "StochasticDepth":  # torchvision's
        return bool(module.p)
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and bool(module.dropout)


def max_norm_warning(model: nn.Module) -> str:
    """Return a warning if an embedding scales the rows that it looks up, which differ between ranks; else ""."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            rows = "the rows of its own part of the batch"
            what = f"{name or 'your model'} has max_norm, by which each rank scales {rows}"
            return f"warning: {what}, so losses depend on the number of processes"
    return ""


def warnings_after_passes(job: Job, compares_buffers: bool, buffers_before: dict[str, str]) -> Iterator[str]:
    """Yield what a step's passes through the user's model and task show; call it on all ranks, before the update.

    `buffers_before` is what buffer_digests() returned before the step.

    Raises UserError as check_state_stays(), on all ranks.
    """
    from recipes.common.user_code import check_state_stays

    run_on_all_ranks(lambda: check_state_stays(job.args, job.model, job.state_shapes), job.peers)
    if job.passes > 1 and (name := find_changed_buffer(job.model, buffers_before, job.peers)):
        what = f"each of a step's {job.passes} passes changes your model's buffer {name}"
        yield f"warning: {what}, so losses depend on the number of passes"
    if job.peers.world_size * len(job.devices) == 1:
        return
    if not dropout_warning(job.model):
        own = has_drawn(job)
        # Draws: each rank sends whether it has drawn, once: a stage of a pipeline, or a branch, may do so alone.
        with job.peers.watch("agreement"):
            drawn = any(job.peers.gather_objects(own))
        if drawn:
            owns = {"model": job.args.model, "task": job.args.task}
            names = " or ".join(name for name, value in owns.items() if is_user_code(value))
            what = f"your {names} draws other random numbers on each rank"
            yield f"warning: {what}, so losses depend on the number of processes"
    if compares_buffers and (name := find_own_buffer(job.model, job.peers)):
        what = f"each rank changes your model's buffer {name} by its own samples"
        yield f"warning: {what}, so losses depend on the number of processes"


def has_drawn(job: Job) -> bool:
    """Return whether this rank's passes have drawn numbers, as functional.dropout() does; seed the step again."""

    def states() -> tuple[str, ...]:
        gpus = [device for device in job.devices if device.type == "cuda"]
        tensors = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]
        return (*(str(tensor.tolist()) for tensor in tensors), str(random.getstate()), str(np.random.get_state()))

    drawn = states()
    seed_step(job.args.seed, job.position.step, job.draws_as, job.devices)
    return drawn != states()


def buffer_digests(model: nn.Module) -> dict[str, str]:
    """Return a digest of each buffer by its name, without batch norm's, which have a warning of their own."""
    owners = {name: module for name, module in model.named_modules() if not isinstance(module, _BatchNorm)}
    return {
        f"{path}.{name}".lstrip("."): f"{tuple(buffer.shape)} {digest(local_tensor(buffer))}"
        for path, module in owners.items()
        for name, buffer in module.named_buffers(recurse=False)
    }


def find_changed_buffer(model: nn.Module, before: dict[str, str], peers: Peers) -> str:
    """Return the name of a buffer that a step's passes have changed on some rank, or ""; call it on all ranks."""
    changed = min((name for name, _ in buffer_digests(model).items() ^ before.items()), default="")
    # Buffers: each rank sends a name, once.
    with peers.watch("agreement"):
        return max(peers.gather_objects(changed))


def find_own_buffer(model: nn.Module, peers: Peers) -> str:
    """Return the name of a buffer that differs between ranks, or ""."""
    own = buffer_digests(model)
    # Buffers: each rank sends a digest of each of its buffers, once.
    with peers.watch("agreement"):
        gathered = peers.gather_objects(own)
    return min((name for facts in gathered for name, _ in facts.items() ^ gathered[0].items()), default="")
