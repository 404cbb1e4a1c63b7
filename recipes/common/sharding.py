"""Weights, gradients and optimizer state of which each rank holds a shard (torch's DTensor).

Recipes whose ranks hold whole weights import none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from recipes.common import loop
from recipes.common.agreement import Slot, map_tree
from recipes.common.job import Job


def update(job: Job, check: Callable[[Sequence[Tensor]], bool]) -> None:
    """Clip, and step the optimizer on this rank's shards if the whole gradient passes the check.

    Call it on all ranks.
    """

    def check_norm(gradients: Sequence[Tensor]) -> bool:
        some = gradients[:1] if job.args.on_nonfinite == "stop" else gradients  # as nonfinite.py does
        with job.peers.watch("gradients"):
            # Sharding: each rank knows the norm of its shards; sums the squares, 4 bytes a rank.
            return check([whole(nn.utils.get_total_norm(some))])

    with job.peers.watch("gradients"):
        loop.update(job, check_norm)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of which ranks hold shards; call it on all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_state(job: Job) -> dict[str, Any] | None:
    """Return the whole weights and optimizer state on rank 0; call it on all ranks."""

    def gather(tensor: Tensor) -> Tensor:
        # Sharding: all-gathers a tensor at a time, (N-1)/N of its bytes per rank; rank 0 keeps it in main memory.
        value = whole(tensor.detach())
        return value.cpu() if job.peers.rank == 0 else value.new_empty(0)

    with job.peers.watch("checkpoint"):
        own = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        state = map_tree(own, Tensor, gather)
    return state if job.peers.rank == 0 else None


def own_shards(model: nn.Module, content: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a checkpoint's content, as broadcast_tree() outlines it, so that this rank keeps its shards alone."""
    if content is None:
        return None
    own = model.state_dict()

    def cut(name: str | None, slot: Any) -> Any:
        like = own.get(name) if name else None
        if not isinstance(like, DTensor) or not isinstance(slot, Slot) or slot.shape != tuple(like.shape):
            return slot
        mesh, placements = like.device_mesh, like.placements
        # Sharding: each rank has received the whole tensor and copies its shard of it; the rest is freed.
        return slot._replace(keep=lambda t: distribute_tensor(t, mesh, placements, src_data_rank=None).clone())

    return map_states(content, model, cut)


def map_states(
    content: dict[str, Any], model: nn.Module, change: Callable[[str | None, Any], Any]
) -> dict[str, Any]:
    """Return a checkpoint's content with change(name, value) in place of weights and of the optimizer's state.

    The name is that of the weight, or of the parameter to which the state belongs (None: the model has none such).
    """
    names = {number: name for number, (name, _) in enumerate(model.named_parameters())}
    optimizer = content["optimizer"]
    state = {
        number: {key: change(names.get(number), value) for key, value in values.items()}
        for number, values in optimizer["state"].items()
    }
    weights = {name: change(name, value) for name, value in content["model"].items()}
    return {**content, "model": weights, "optimizer": {**optimizer, "state": state}}
