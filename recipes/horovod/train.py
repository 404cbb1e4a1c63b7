"""Horovod: a process per GPU, gradients averaged by name, in half precision, while backward still runs.

    make run RECIPE=horovod NODES=2
    .venv/bin/horovodrun --gloo -np 2 .venv/bin/python -m recipes.horovod.train
    mpirun -np 2 .venv/bin/python -m recipes.horovod.train

Success: the last line is `result recipe=horovod world_size=2 test_accuracy=0.98.. samples_per_s=...`.
Source: Sergeev and Del Balso 2018, https://arxiv.org/abs/1802.05799.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from recipes.common.arguments import choice, is_user_code
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.loop import Check, Technique, begin_run, load_data_and_model, train_epochs, update
from recipes.common.models.models import compile_forward
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import Options, parse
from recipes.common.parallel.buckets import check_frozen, find_unused, frozen
from recipes.common.process.entry import run_main
from recipes.common.process.ranks import Ranks
from recipes.common.process.signals import Stop
from recipes.common.watch.timeouts import set_horovod_timeout
from recipes.common.watch.watch import Watch
from recipes.common.world.devices import agree_on_device, choose_device
from recipes.common.world.peers import Peers, broadcast_bytes
from recipes.common.world.transport import log_nccl

try:
    import horovod.torch as hvd
except ModuleNotFoundError as error:
    if error.name != "horovod":
        raise
    hvd = None  # not built: main() says how to build it

LAUNCHERS = {"WORLD_SIZE": "torchrun", "OMPI_COMM_WORLD_SIZE": "another Open MPI", "PMI_SIZE": "another MPI"}
"""Launchers whose processes Horovod does not connect, by the variable that has the number of processes."""

T = TypeVar("T")


@dataclass(frozen=True)
class HorovodOptions(Options):
    """Horovod."""

    compression: str = choice("how gradients cross the wire; none: as fp32", "fp16", "none")

    @property
    def takes_sparse_gradients(self) -> bool:
        """Not with compression."""
        return super().takes_sparse_gradients and self.compression == "none"


options = partial(parse, HorovodOptions, "horovod", __doc__)


@dataclass(frozen=True)
class World(Peers):
    """This process's rank and device, and its collectives with the other ranks."""

    rank: int
    world_size: int
    device: torch.device
    watch: Watch

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks; call it on all ranks."""
        # Horovod: gathers the pickled value of each rank.
        return hvd.allgather_object(value, name="objects")

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value; call it on all ranks."""
        # Horovod: rank 0 sends its pickled value to all others.
        return hvd.broadcast_object(value, root_rank=0, name="object")

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrite a tensor with rank 0's; call it on all ranks."""
        # Horovod: rank 0 sends the tensor's bytes to all others. It knows neither int16 nor bfloat16.
        broadcast_bytes(tensor, lambda own: hvd.broadcast_(own, root_rank=0, name="tensor"))

    def sum_tensor(self, tensor: Tensor) -> None:
        """Overwrite a tensor, on the CPU or this rank's device, with the ranks' sum; call it on all ranks."""
        # Horovod: a ring all-reduce; each rank sends 2 (N-1)/N of the tensor's bytes.
        hvd.allreduce_(tensor, op=hvd.Sum, name="sum")

    def begin_vote(self, vote: int) -> Callable[[], int]:
        """Send this rank's vote; return a function that waits for the others' and returns the largest."""
        # Horovod: each rank sends its vote, 4 bytes, while it computes.
        voting = hvd.allreduce_async(torch.tensor(vote, dtype=torch.int32), op=hvd.Max, name="vote")
        return lambda: int(hvd.synchronize(voting))


def join_world(args: HorovodOptions) -> World:
    """Choose this process's device and return its World; main() has already connected the processes."""
    # Horovod: hvd gives each process its rank, whatever launched the process.
    ranks = Ranks(hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size())
    device = agree_on_device(
        lambda: choose_device(args.device, ranks, has_nccl=hvd.nccl_built()),
        ranks.rank,
        # Horovod: gathers each rank's kind of device and its host.
        lambda kind, text: dict(reversed(hvd.allgather_object((kind, text), name="device"))),
    )
    if device.type == "cuda":
        log_nccl()
    # Horovod: ranks share no store, so what each one waits for is known on its own host only.
    return World(ranks.rank, ranks.world_size, device, Watch(ranks.rank, ranks.world_size, args, None))


def leave_world(world: World) -> None:
    """Disconnect once no rank waits for another; call it on all ranks."""
    with world.watch("teardown"):
        hvd.barrier()
    world.watch.close()
    hvd.shutdown()


def wrap(model: nn.Module, args: HorovodOptions, world: World) -> Any:
    """Return an optimizer that averages the model's gradients over all ranks before it steps."""
    if args.sync_batchnorm:
        raise UserError("--sync-batchnorm: torch's does not use Horovod; use --batchnorm-group, or RECIPE=ddp")
    # Horovod: it takes contiguous tensors only, so --channels-last applies only to images and activations.
    model.to(memory_format=torch.contiguous_format)
    try:
        # Horovod: rank 0 broadcasts its parameters to all ranks.
        hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    except ValueError as error:  # it would not average their gradients, either
        what = f"--model {args.model}: Horovod: {str(error).rstrip('.')}"
        fix = "make it so" if "contiguous" in str(error) else "use another dtype"
        raise UserError(f"{what}; {fix}, or RECIPE=ddp") from None
    compile_forward(model, args)
    optimizer = build_optimizer(args, model, world)
    if is_user_code(args.optimizer):
        check_copy(optimizer, args)
    # Horovod: a hook on each parameter submits its gradient as soon as backward has computed it. Gradients that
    # are ready on all ranks are fused into one buffer and averaged (a ring: 2 (N-1)/N of its bytes per rank).
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        # Horovod: half the bytes: each gradient is cast to fp16, averaged in fp16, and cast back.
        compression=hvd.Compression.fp16 if args.compression == "fp16" else hvd.Compression.none,
        # Horovod: gradients are exchanged only in the last of the accumulated passes.
        backward_passes_per_step=args.accumulate_steps,
    )


def check_copy(optimizer: torch.optim.Optimizer, args: HorovodOptions) -> None:
    """Raise UserError if Horovod cannot rebuild the user's optimizer: it passes only the param groups."""
    make: Any = type(optimizer)
    what = f"--optimizer {args.optimizer}: Horovod builds it only from its groups, and"
    try:
        copy = make(optimizer.param_groups)
    except TypeError as error:
        raise UserError(f"{what} {error}; give these arguments defaults, or use RECIPE=ddp") from error
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UserError(f"{what} drops the hooks of its step; let step() do their work, or use RECIPE=ddp")
    for name, value in vars(optimizer).items():
        if isinstance(value, bool | int | float | str) and (there := getattr(copy, name, None)) != value:
            raise UserError(
                f"{what} {name} is then {there}, not {value}; keep it in the groups, or use RECIPE=ddp"
            )


def train(args: HorovodOptions, world: World, stop: Stop) -> None:
    """Train with the given options; call it on all ranks."""
    data, model = load_data_and_model(args, "horovod", world, stop)
    with world.watch("model", computes=True):
        optimizer = wrap(model, args, world)
    frozen_parameters = frozen(model)
    job = Job(args, "horovod", data, world, model, optimizer, build_scaler(args, world.device), stop)

    def forward_backward(inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        """Accumulate the gradients of one pass; return this rank's part of the loss."""
        with autocast(args, world.device):
            loss = job.loss(model(inputs), targets)
        # Horovod: gradients are averaged over the ranks; this factor makes the result the global batch's mean.
        job.scaler.scale(loss * world.world_size).backward()
        if is_last:
            check_frozen(frozen_parameters)
            unused = find_unused(model, args, world)
            # Horovod: waits until the gradients have arrived; clipping needs them before the step.
            with world.watch("gradients"):
                optimizer.synchronize()
            for parameter in unused:
                parameter.grad = None  # Horovod: it has averaged zeros
        return loss.detach()

    def step(job: Job, check: Check) -> None:
        """Step the optimizer if the gradients pass the check."""
        with optimizer.skip_synchronize():  # Horovod: the gradients have arrived
            update(job, check)

    # Horovod: rank 0 reads the checkpoint and broadcasts it. All ranks hold the same weights: rank 0 writes them.
    # (hvd.broadcast_optimizer_state could send the optimizer's state, but steps an optimizer that has none yet.)
    begin_run(job)
    train_epochs(job, Technique(forward_backward, model, update=step))
    job.finish()


def foreign_launcher() -> str:
    """Return the launcher of several processes that Horovod does not connect; "" if there is none."""
    if hvd.size() > 1 or "HOROVOD_SIZE" in os.environ:
        return ""
    return next((launcher for name, launcher in LAUNCHERS.items() if os.environ.get(name, "1") != "1"), "")


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the options in argv; call it on every rank."""
    if hvd is None:
        options(argv)
        raise UserError("Horovod is not built for this Python; run `make horovod`", on_every_node=True)
    try:
        args = options(argv)
        # Horovod: bounds the wait for a rank that is alive but does not join; a dead rank is noticed at once.
        set_horovod_timeout(args.timeout_s)
        if args.deterministic:
            # Horovod: timing decides which gradients travel together, and so how three or more ranks round a sum.
            os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"  # each travels alone
    finally:
        # Horovod: connects all processes. Only then does each know whether it is rank 0, which prints UserErrors.
        hvd.init()
        launcher = foreign_launcher()
        if not launcher:
            own = {"RANK": hvd.rank(), "LOCAL_RANK": hvd.local_rank(), "LOCAL_WORLD_SIZE": hvd.local_size()}
            os.environ.update({name: str(value) for name, value in own.items()})
    if launcher:
        fix = "start them with `make run RECIPE=horovod`, horovodrun or the mpirun of the MPI it was built for"
        raise UserError(f"Horovod does not connect processes that {launcher} starts; {fix}")
    stop = Stop()
    world = join_world(args)
    try:
        train(args, world, stop)
    except UserError as error:
        if not error.on_one_rank:
            leave_world(world)
        raise
    leave_world(world)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
