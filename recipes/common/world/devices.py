"""Which devices the processes of a job work on: all ranks use GPUs, on nodes of one network, or all use CPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

import torch

from recipes.common.arguments import read_number
from recipes.common.errors import UserError
from recipes.common.process.ranks import HAVE_MET, Ranks

NETWORKS = ("ib", "roce", "efa", "tcp")
KINDS = ("error", "cpu", "cuda", *(f"cuda over {network}" for network in NETWORKS))
"""What ranks send each other: an error, or the kind of device, of a GPU also its node's network if it is known."""

Exchange = Callable[[str, str], Mapping[str, str]]
"""Sends a kind and a text to all ranks; returns, for each kind that any rank sent, the text of one such rank."""


def choose_devices(wanted: str) -> list[torch.device]:
    """Return the devices of a job of one process: all visible GPUs, or the CPU if there are none.

    Raises UserError if --device is cuda and no GPU is visible, if the first GPU does not work, or if a launcher
    has started several processes, each of which would train by itself.
    """
    if (count := read_number("WORLD_SIZE", 1)) > 1:
        fix = "start one, without torchrun, or use RECIPE=ddp"
        raise UserError(f"{count} processes were started, and this recipe is one; {fix}")
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and not count:
        raise UserError("--device cuda: no GPU is visible; use --device cpu")
    if not count:
        return [torch.device("cpu")]
    start_gpu(torch.device("cuda", 0))
    # Anew: until a GPU is used, torch counts those that the driver lists, of which MIG lets a process use one.
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def choose_device(wanted: str, ranks: Ranks, devices_per_rank: int = 1, has_nccl: bool = True) -> torch.device:
    """Return the first of this process's GPUs, or the CPU.

    `wanted` is --device. With auto, a node without GPUs uses CPUs; a node with too few GPUs is an error.
    `has_nccl`: whether the communication library can exchange gradients between GPUs.

    Raises UserError if GPUs are present or requested and cannot be used.
    """
    visible = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not visible):
        return torch.device("cpu")
    host, on_node = socket.gethostname(), ranks.local_world_size
    if visible < on_node * devices_per_rank:
        each = f"{devices_per_rank} GPUs" if devices_per_rank > 1 else "a GPU"
        most = visible // devices_per_rank
        fix = f"start at most {most} on each node (NPROC_PER_NODE)" if most else "make GPUs visible there"
        if most:  # such as under srun --gpus-per-task
            fix += ", or let each process see all GPUs of its node,"
        what = f"{on_node} processes on {host} need {each} each, {visible} visible"
        raise UserError(f"--device {wanted}: {what}; {fix} or use --device cpu")
    if not has_nccl:
        what = f"{host} has GPUs, and Horovod was built without NCCL"
        raise UserError(f"--device {wanted}: {what}; run `make horovod` where CUDA is, or use --device cpu")
    return torch.device("cuda", ranks.local_rank * devices_per_rank)


def start_gpu(device: torch.device) -> None:
    """Make a GPU this process's current device, and compute a number on it.

    Raises UserError if that fails: torch counts GPUs even if its CUDA cannot use them, as with an old driver.
    """
    try:
        torch.cuda.set_device(device)
        torch.ones((), device=device).item()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        reason = str(error).strip().split("\n")[0][:300]
        fix = "see `make doctor` for the cause, or use --device cpu"
        raise UserError(f"{device} on {socket.gethostname()} does not work: {reason}; {fix}") from None


def agree_on_device(choose: Callable[[], torch.device], rank: int, exchange: Exchange) -> torch.device:
    """Return this rank's device once all ranks have chosen the same kind; call it on all ranks.

    A GPU is its process's current device then. Raises UserError on all ranks if one of them cannot use its GPU, if
    some have GPUs and some have none, or if their nodes use different networks.
    """
    here = f"rank {rank} on {socket.gethostname()}"
    try:
        device = choose()
        kind, text = device.type, here
        if device.type == "cuda":
            start_gpu(device)
            # What scripts/launch/fabric.sh has chosen, such as "tcp (no port of mlx5_0 is active)".
            used = os.environ.get("FABRIC_USED", "")
            if (network := used.partition(" ")[0]) in NETWORKS:
                kind, text = f"cuda over {network}", f"{here} over {used}"
    except UserError as error:
        kind, text = "error", str(error)
    found = exchange(kind, text)
    HAVE_MET.set()
    if "error" in found:
        raise UserError(found["error"])
    gpus = [found[kind] for kind in found if kind != "cpu"]
    if gpus and "cpu" in found:
        what = f"{gpus[0].partition(' over ')[0]} has a GPU, {found['cpu']} has none or does not use it"
        raise UserError(f"{what}; make GPUs visible on every node, or use --device cpu on all")
    if len(gpus) > 1 and "cuda" not in found:
        what = f"nodes use different networks, which NCCL cannot connect: {', '.join(gpus)}"
        fix = "fix the node that lacks the others' network, or leave it out; or set one FABRIC on all, such as tcp"
        raise UserError(f"{what}; {fix}", is_passing=True)
    return device
