"""Sharded weights, gradients and optimizer state: each rank holds a shard (torch's DTensor).

Recipes whose ranks hold whole weights import none of this.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from recipes.common import loop
from recipes.common.checkpoint.checkpoint import CheckpointFolder, CheckpointWriter
from recipes.common.checkpoint.shard_files import Box, ShardedFolder, is_reference, read_box
from recipes.common.data.file_pool import FilePool
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.nonfinite import total_norm
from recipes.common.optim import optimizer_state
from recipes.common.options import Options
from recipes.common.world.peers import Peers, local_tensor
from recipes.common.world.tree import Slot

Boxes = Callable[[str | None, Box], list[Box]]
"""Maps a parameter's name and the box of a rank's shard to the boxes that the shard has in the unsplit model."""


def update(job: Job, check: Callable[[Sequence[Tensor]], bool]) -> None:
    """Clip the gradients, and step the optimizer on this rank's shards if the whole gradient passes the check.

    Call it on all ranks. Raises UserError in the first step if the user's optimizer does not work on shards.
    """

    def check_norm(gradients: Sequence[Tensor]) -> bool:
        some = gradients[:1] if job.args.on_nonfinite == "stop" else gradients  # as nonfinite.py does
        with job.peers.watch("gradients"):
            return check([norm_over_ranks(some)])

    try:
        # Sharding: an operation of the user's optimizer on a whole parameter, such as a norm, sums over the ranks.
        with job.peers.watch("gradients"):
            loop.update(job, check_norm, clip_shards)
    except RuntimeError as error:
        if not job.is_unseen_optimizer or not re.search(ABOUT_SHARDS, str(error)):
            raise
        from recipes.common.user_code import refusal

        what = f"--optimizer {job.args.optimizer}: step() on shards failed"
        raise refusal(what, error, "let it use other operations, or use RECIPE=ddp") from error


ABOUT_SHARDS = r"DTensor|aten\.|shard|subclass"
"""What torch says of operations that it cannot do on shards."""


def check_sharded_state(args: Options, optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if the user's optimizer keeps what a checkpoint could not give back to its shards."""
    what, fix = f"--optimizer {args.optimizer}", "let it keep numbers"
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, DTensor):
                raise UserError(f"{what}: {name} of a group is spread over the ranks (DTensor); {fix}")
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(parameter, DTensor) and not is_restored(value, parameter):
                state = f"{name} of a parameter's state is not sharded as the parameter is"
                fix += " and tensors of its shape, made by torch.zeros_like(parameter), or use RECIPE=ddp"
                raise UserError(f"{what}: {state}, so that no checkpoint could restore it; {fix}")


def is_restored(value: Tensor, parameter: DTensor) -> bool:
    """Return whether a checkpoint gives back a tensor of a parameter's state: a number, or one sharded alike."""
    if not isinstance(value, DTensor):
        return value.numel() == 1
    return value.shape == parameter.shape and value.placements == parameter.placements


def clip_shards(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Do the same as nn.utils.clip_grad_norm_(), for whole gradients and shards on any meshes.

    Call it on all ranks.
    """
    norm = norm_over_ranks([parameter.grad for parameter in parameters if parameter.grad is not None])
    meshes: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    for own in meshes.values():
        nn.utils.clip_grads_with_norm_(own, max_norm, norm)
    return norm


def norm_over_ranks(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients, whole ones and shards on any meshes; call it on all ranks."""
    parts: dict[tuple[DeviceMesh | None, tuple[Placement, ...]], list[Tensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            kinds = (Replicate() if kind.is_replicate() else Partial() for kind in gradient.placements)
            parts.setdefault((gradient.device_mesh, tuple(kinds)), []).append(gradient.to_local())
        else:
            parts.setdefault((None, ()), []).append(gradient)
    norms = []
    for (mesh, sums), own in parts.items():
        norm = total_norm(own)
        if mesh:
            # Sharding: each rank knows the norm of its shards; sums their squares, 4 bytes a rank.
            norm = gather_whole(DTensor.from_local(norm**2, mesh, sums, run_check=False)).sqrt()
        norms.append(norm)
    return nn.utils.get_total_norm(norms)


def gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor whose shards are spread over ranks; call it on all ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Gloo knows neither int16 nor float8, which frozen weights may have.
    wide = torch.float32 if tensor.is_floating_point() and tensor.element_size() == 1 else tensor.dtype
    wide = torch.int32 if tensor.dtype == torch.int16 else wide
    whole = cast(DTensor, tensor.to(wide))
    for i in range(tensor.device_mesh.ndim):  # one by one, or torch would warn that it does so
        placements = list(whole.placements)
        placements[i] = Replicate()
        whole = whole.redistribute(placements=placements)
    return whole.full_tensor().to(tensor.dtype)


def gather_state(job: Job) -> dict[str, Any] | None:
    """Return the whole weights and optimizer state on rank 0; call it on all ranks."""

    def gather(name: str | None, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # Sharding: all-gathers a tensor at a time, (N-1)/N of its bytes per rank; rank 0 keeps it in main memory.
        with job.peers.watch("checkpoint"):  # of each: on a slow network, all of them take longer than a wait may
            tensor = gather_whole(value.detach())
            if job.peers.rank == 0:
                return tensor.cpu()
            if tensor.is_cuda:  # else it would queue all gathers, and wait for rank 0 in the next collective
                torch.cuda.current_stream(tensor.device).synchronize()
            return tensor.new_empty(0)

    own = {"model": job.model.state_dict(), "optimizer": optimizer_state(job.optimizer)}
    state = map_states(own, job.model, gather)
    return state if job.peers.rank == 0 else None


def own_shards(model: nn.Module, content: dict[str, Any]) -> dict[str, Any]:
    """Return broadcast_tree()'s outline of a checkpoint, changed so that this rank keeps only its own shards."""
    own = model.state_dict()

    def cut(name: str | None, slot: Any) -> Any:
        like = own.get(name) if name else None
        if not isinstance(like, DTensor) or not isinstance(slot, Slot) or slot.shape != tuple(like.shape):
            return slot
        place = tuple(slice(*ends) for ends in own_box(like))
        # Sharding: each rank has received the whole tensor and copies its shard of it; the rest is freed.
        return slot._replace(keep=lambda tensor: shard_like(like, tensor[place].clone()))

    return map_states(content, model, cut)


def shard_like(like: DTensor, local: Tensor) -> DTensor:
    """Return the tensor whose shard on this rank is `local`, placed as another tensor is."""
    layout: dict[str, Any] = {"shape": like.shape, "stride": like.stride()}
    tensor = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **layout)
    return cast(DTensor, tensor.to(like.to_local().device))  # from_local() has moved it to the mesh's


def write_shards(job: Job, with_own_group: Callable[[Options, float], Peers]) -> None:
    """With --sharded-checkpoints, let ranks write their parts, over their own connections. Call on all ranks."""
    if job.args.sharded_checkpoints:
        folder = job.record.checkpoints if job.record else CheckpointFolder(job.folder / "checkpoints")
        peers = with_own_group(job.args, job.write_s)
        job.writer = CheckpointWriter(ShardedFolder(folder, peers).write, job.stop.fail)


def own_state(job: Job, grid: DeviceMesh | None = None, boxes: Boxes = lambda name, box: [box]) -> dict[str, Any]:
    """Return this rank's part of a checkpoint: references instead of tensors, and in `parts` its file's tensors.

    Of ranks that hold the same data, one writes it. `grid` is the mesh of all ranks (default: each tensor's).
    Call it on all ranks.
    """
    parts: list[Tensor] = []
    place = 0

    def refer(name: str | None, value: Any) -> Any:
        nonlocal place
        if not isinstance(value, Tensor):
            return value
        pieces, row, local = [], 0, local_tensor(value)
        for box in boxes(name, own_box(value)) if is_written_here(value, job.peers.rank, grid) else []:
            rows = box[0][1] - box[0][0] if box else 1
            part = local.detach().narrow(0, row, rows) if box else local.detach()
            row += rows
            if part.numel():
                pieces.append([place, box])
                parts.append(part)
                place += part.nbytes
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "pieces": pieces}

    own = {"model": job.model.state_dict(), "optimizer": optimizer_state(job.optimizer)}
    return {**map_states(own, job.model, refer), "parts": parts}


def is_written_here(tensor: Tensor, rank: int, grid: DeviceMesh | None) -> bool:
    """Return whether this rank is the first of those in the grid that hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    grid = grid or tensor.device_mesh
    kinds = zip(cast(Any, tensor.device_mesh).mesh_dim_names, tensor.placements, strict=True)
    split = {name for name, kind in kinds if not kind.is_replicate()}
    return all(name in split or grid.get_local_rank(name) == 0 for name in cast(Any, grid).mesh_dim_names)


def own_box(tensor: Tensor) -> Box:
    """Return this rank's part of a tensor: of n rows, each of m ranks has ceil(n / m), the last ones fewer.

    The last dimension of the mesh splits first: FSDP shards what tensor parallelism has left to a rank.
    """
    box = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        for i, placement in reversed(list(enumerate(tensor.placements))):
            if isinstance(placement, Shard | _StridedShard):
                first, end = box[placement.dim]
                size = -(-(end - first) // tensor.device_mesh.size(i))
                first = min(first + size * tensor.device_mesh.get_local_rank(i), end)
                box[placement.dim] = (first, min(first + size, end))
    return tuple(box)


def read_shards(
    model: nn.Module, content: dict[str, Any], boxes: Boxes = lambda name, box: [box]
) -> dict[str, Any]:
    """Return a sharded checkpoint's content with this rank's parts of tensors, read from the files.

    Any other checkpoint's content is returned unchanged. Raises UserError if a file cannot be read.
    """
    if "shards" not in content:
        return content
    own, shards = model.state_dict(), content["shards"]

    def read(name: str | None, value: Any) -> Any:
        if not is_reference(value):
            return value
        like = own.get(name) if name else None
        if not isinstance(like, DTensor) or value["shape"] != list(like.shape):
            return read_box(value, tuple((0, size) for size in value["shape"]), shards, files)
        local = [read_box(value, box, shards, files) for box in boxes(name, own_box(like))]
        return shard_like(like, local[0] if len(local) == 1 else torch.cat(local))

    with contextlib.closing(FilePool(len(shards["files"]))) as files:
        return map_states(content, model, read)


def names_of_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter: more than one if modules share it."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.values())


def map_states(
    content: dict[str, Any], model: nn.Module, change: Callable[[str | None, Any], Any]
) -> dict[str, Any]:
    """Return a checkpoint's content in which change(name, value) replaces each weight and each optimizer state.

    The name of a state is its parameter's (None: the model has no such parameter). A tied weight is changed once,
    under its first name.
    """
    uses = names_of_parameters(model)
    names = {number: first for number, (first, *_) in enumerate(uses)}
    first_names = {name: first for first, *others in uses for name in (first, *others)}
    optimizer = content["optimizer"]
    state = {
        number: {key: change(names.get(number), value) for key, value in values.items()}
        for number, values in optimizer["state"].items()
    }
    changed: dict[str, Any] = {}
    weights = copy.copy(content["model"])  # with its attributes: a module's state_dict() has versions there
    for name, value in content["model"].items():
        first = first_names.get(name, name)
        changed[name] = weights[name] = changed[first] if first in changed else change(name, value)
    return {**content, "model": weights, "optimizer": {**optimizer, "state": state}}
