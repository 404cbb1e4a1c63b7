"""nn.DataParallel: one process, a thread per GPU, the model copied to all of them at every step.

    make run RECIPE=dataparallel
    .venv/bin/python -m recipes.dataparallel.train

Success: the last line is `result recipe=dataparallel world_size=1 test_accuracy=0.98.. samples_per_s=...`.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.loop import Technique, begin_run, load_data_and_model, train_epochs
from recipes.common.models.batchnorm import check_parts
from recipes.common.models.models import compile_forward
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import Options, parse
from recipes.common.process.entry import run_main
from recipes.common.process.signals import Stop
from recipes.common.world.devices import choose_devices
from recipes.common.world.peers import Peers

options = partial(parse, Options, "dataparallel", __doc__)


class Autocast(nn.Module):
    """The model, run in its own mixed-precision context."""

    def __init__(self, model: nn.Module, args: Options, device: torch.device) -> None:
        super().__init__()
        self.model, self.args, self.device = model, args, device

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's output, such as logits (B, classes) for images (B, C, S, S)."""
        # DataParallel: each replica runs in its own thread. DataParallel passes on to it that autocast is enabled,
        # but not that the dtype is bf16.
        with autocast(self.args, self.device):
            return self.model(inputs)


def wrap(model: nn.Module, args: Options, devices: list[torch.device]) -> nn.Module:
    """Wrap the model so that it splits each batch over the devices."""
    if len(devices) == 1:
        # DataParallel: with one device there is nothing to split or to copy.
        print(f"DataParallel has one device here ({devices[0]}) and degenerates to RECIPE=single", flush=True)
    elif args.sync_batchnorm:
        raise UserError("--sync-batchnorm: needs a process per GPU, DataParallel is one; use RECIPE=ddp")
    elif args.batchnorm_group:
        what = "DataParallel keeps only the running statistics of the first GPU's groups"
        raise UserError(f"--batchnorm-group: {what}; use RECIPE=ddp")
    elif args.activation_checkpointing:
        raise UserError("--activation-checkpointing: blocks would run again as the first GPU's; use RECIPE=ddp")
    elif args.compile:
        raise UserError("--compile: replicas would all run the code of the first; drop it or use RECIPE=ddp")
    compile_forward(model, args)
    inner = Autocast(model, args, devices[0])
    if devices[0].type == "cpu":
        return inner  # DataParallel would use all GPUs, even with --device cpu
    # DataParallel: every forward pass sends the model's parameters and buffers to each other GPU, and 1/N of the
    # batch; the logits come back. Every backward pass sends each GPU's gradients to the first, which adds them up.
    return DataParallel(inner, device_ids=devices)


def smallest_share(args: Options, devices: int) -> int:
    """Return the fewest samples of a device in a pass: the last one with samples has what the others leave."""
    passes = args.accumulate_steps
    shares = []
    for samples in (args.global_batch_size // passes, -(-args.global_batch_size // passes)):
        size = -(-samples // devices)
        shares.append(samples - size * ((samples - 1) // size))
    return min(shares)


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the options in argv."""
    args = options(argv)
    stop = Stop()
    # DataParallel: one process drives every GPU that it sees; CUDA_VISIBLE_DEVICES chooses them.
    devices = choose_devices(args.device)
    alone = Peers(devices[0])
    data, model = load_data_and_model(args, "dataparallel", alone, stop)
    # DataParallel: batch norm sees each device's share of a pass.
    check_parts(model, args, len(devices) * args.accumulate_steps, data, smallest_share(args, len(devices)))
    parallel = wrap(model, args, devices)
    optimizer, scaler = build_optimizer(args, model, alone), build_scaler(args, alone.device)
    # DataParallel: the job and its checkpoints hold the plain model, so any recipe can resume from them.
    job = Job(args, "dataparallel", data, alone, model, optimizer, scaler, stop, devices)
    job.eval_batch_size *= len(devices)  # a pass is spread over them

    def forward_backward(inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        """Accumulate the gradients of one pass; return its loss."""
        # DataParallel: the first GPU gathers the logits of all GPUs and computes the global batch's loss, so
        # nothing has to be averaged afterwards.
        with autocast(args, alone.device):
            loss = job.loss(parallel(inputs), targets)
        scaler.scale(loss).backward()
        return loss.detach()

    begin_run(job)
    train_epochs(job, Technique(forward_backward, parallel))
    job.finish()


if __name__ == "__main__":
    raise SystemExit(run_main(main))
