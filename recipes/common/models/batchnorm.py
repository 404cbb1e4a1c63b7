"""Batch norm with statistics over groups of the global batch, the same at every number of processes.

Each rank has whole groups (see loop.py), so training exchanges nothing; the running statistics of the ranks are
averaged before an evaluation and before a checkpoint. Small groups, known as ghost batch norm, also regularise:
Hoffer et al. 2017, https://arxiv.org/abs/1705.08741.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.world.agreement import run_on_all_ranks, shard
from recipes.common.world.peers import Peers


class GroupBatchNorm(_BatchNorm):
    """Batch norm that uses, in training, the statistics of each group of consecutive samples.

    A step updates the running statistics once, by the mean of its groups: R <- (1 - m) R + m/k (S_1 + ... + S_k).
    This is linear in the groups: the mean of the ranks' statistics equals the statistics of one process with all
    groups.
    """

    group_size: int
    groups_per_step: int
    """Groups that this process normalises in a step, over all its passes or microbatches."""
    groups_done: int
    """Groups of the current step that are done."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, C, ...), B a multiple of the group size; in eval(), by the running statistics."""
        if not self.training:
            return super().forward(input)
        outputs = [self.normalise_group(group) for group in input.split(self.group_size)]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept samples of any shape, as nn.SyncBatchNorm does."""

    def normalise_group(self, group: Tensor) -> Tensor:
        """Normalise one group, and add its part to the running statistics."""
        if self.num_batches_tracked is not None and self.groups_done == 0:
            self.num_batches_tracked.add_(1)
        m = self.momentum
        if m is None:  # torch's cumulative average
            m = 1 / float(self.num_batches_tracked) if self.num_batches_tracked is not None else 0.0
        # The i-th of k groups (from 0) gets the weight a_i = m / (k - (k - 1 - i) m). After the last group, the
        # weight of every group is m/k, and the old statistics have 1 - m: batch_norm() itself forms the mean.
        k, i = self.groups_per_step, self.groups_done
        weight = m / (k - (k - 1 - i) * m)
        self.groups_done = (i + 1) % k
        return functional.batch_norm(
            group, self.running_mean, self.running_var, self.weight, self.bias, True, weight, self.eps
        )


def plain_layers(model: nn.Module) -> Iterator[_BatchNorm]:
    """Yield the batch-norm layers that normalise by whatever batch they get."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, GroupBatchNorm | nn.SyncBatchNorm):
            yield module


def set_groups(model: nn.Module, args: Options, peers: Peers, replicas: int) -> None:
    """Make batch norm use groups of --batchnorm-group in this rank's share of the batch; call it on all ranks.

    Each replica has one share of the batch, and is an equal number of neighbouring ranks.

    Raises UserError on all ranks if the model has no batch norm.
    """
    run_on_all_ranks(lambda: check_groups(model, args), peers)
    size = args.batchnorm_group or 1
    groups = torch.arange(args.global_batch_size // size)
    replica = peers.rank * replicas // peers.world_size
    group_batch_norm(model, args, size * len(shard(groups, replica, replicas)))


def group_batch_norm(model: nn.Module, args: Options, share_size: int) -> None:
    """Make a model's batch norm use groups of --batchnorm-group, if given; `share_size`: its samples per step.

    The layers change in place, so that other references to them and to their weights stay valid.
    """
    if not args.batchnorm_group:
        return
    for layer in list(plain_layers(model)):
        layer.__class__ = GroupBatchNorm
        groups_per_step = share_size // args.batchnorm_group
        vars(layer).update(group_size=args.batchnorm_group, groups_per_step=groups_per_step, groups_done=0)


def sync_batch_norm(model: nn.Module, peers: Peers) -> nn.Module:
    """Return the model with nn.SyncBatchNorm, as --sync-batchnorm asks: statistics over a pass of all ranks.

    Raises UserError on CPUs, or as check_forward().
    """
    if peers.device.type == "cpu":
        fix = "use --batchnorm-group, which exchanges nothing"
        raise UserError(f"--sync-batchnorm: torch has it for GPUs only; {fix}")
    check_forward(model, "--sync-batchnorm")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def check_groups(model: nn.Module, args: Options) -> None:
    """Raise UserError if --batchnorm-group is given and the model has no batch norm, or as check_forward()."""
    if args.batchnorm_group:
        flag = f"--batchnorm-group {args.batchnorm_group}"
        if not any(plain_layers(model)):
            raise UserError(f"{flag}: --model {args.model} has no batch norm; drop it")
        check_forward(model, flag)


def check_forward(model: nn.Module, flag: str) -> None:
    """Raise UserError if a batch norm's forward() does more than torch's, such as timm's with an activation.

    A layer that replaces it, with other statistics, would leave that out.
    """
    if layer := own_forward(model):
        fix = "use torch's, with what follows it as a layer, or drop the option"
        raise UserError(f"{flag}: {layer}, whose forward() is not that of torch's batch norm; {fix}")


def own_forward(model: nn.Module) -> str:
    """Return the first batch norm with a forward() of its own, such as "bn1 is a BatchNormAct2d"; "" if none."""
    for layer in plain_layers(model):
        if getattr(layer.forward, "__func__", None) is not _BatchNorm.forward:
            name = next(name for name, module in model.named_modules() if module is layer) or "the model"
            return f"{name} is a {type(layer).__name__}"
    return ""


@contextlib.contextmanager
def checked_rows(model: nn.Module, args: Options, count: int) -> Iterator[None]:
    """With --batchnorm-group, check in a forward pass of `count` samples that batch norm gets a row per sample.

    Raises UserError in the pass otherwise, as in one that flattens (B, T, C) to (B * T, C).
    """

    def check(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) != count:
            what = f"batch norm of --model {args.model} gets {len(inputs[0])} rows for {count} samples"
            fix = "give it a row per sample, such as (B, C, T), or drop the option"
            raise UserError(f"--batchnorm-group {args.batchnorm_group}: {what}; {fix}")

    layers = plain_layers(model) if args.batchnorm_group else ()
    hooks = [layer.register_forward_pre_hook(check) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def average_statistics(model: nn.Module, args: Options, sum_tensor: Callable[[Tensor], None]) -> None:
    """Give all ranks the mean of their running statistics, weighted by their groups; call it on all ranks.

    `sum_tensor` overwrites a tensor with its sum over the replicas, which share out the batch.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GroupBatchNorm)]
    buffers = [b for layer in layers for b in (layer.running_mean, layer.running_var) if b is not None]
    if not buffers:
        return
    weight = layers[0].groups_per_step * layers[0].group_size / args.global_batch_size
    # Double: statistics that are already the same stay so to the last bit.
    total = torch.cat([buffer.double().to(buffers[0].device) for buffer in buffers]) * weight
    sum_tensor(total)
    for buffer, mean in zip(buffers, total.split([len(buffer) for buffer in buffers]), strict=True):
        buffer.copy_(mean)


def warning(model: nn.Module, args: Options, batch_parts: int) -> str:
    """Return a warning if batch norm makes losses depend on the number of processes, else "".

    `batch_parts` is the number of parts of the global batch that go through the model one by one, on all ranks.
    """
    if batch_parts == 1 or not any(plain_layers(model)):
        return ""
    size, left_over = divmod(args.global_batch_size, batch_parts)
    way = f"with --batchnorm-group {size} they are the same at every number"
    if left_over or size < 2:
        way = "recipes/README.md says how they can be the same at every number"
    if layer := own_forward(model):
        way = f"{layer}, and --batchnorm-group takes only torch's batch norm"
    what = f"batch norm normalises each of {batch_parts} parts of the batch by itself"
    return f"warning: {what}, so losses depend on the number of processes; {way}"


def check_parts(model: nn.Module, args: Options, batch_parts: int, data: Data, least: int | None = None) -> None:
    """Raise UserError if some parts of the batch have one sample, which batch norm refuses.

    It refuses a single value per channel. `batch_parts`: as for warning(). `least`: the samples of the smallest
    part (default: parts are as even as possible).
    """
    least = args.global_batch_size // batch_parts if least is None else least
    if least >= 2 or args.sync_batchnorm or not any(plain_layers(model)):
        return
    device = next(model.parameters(), torch.empty(0)).device
    trial = copy.deepcopy(model).to(device).train()  # buffers too: fsdp has only the weights on "meta"
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            trial(data.examples(1)[0].to(device))
    except Exception as error:
        if not isinstance(error, ValueError) or "more than 1 value per channel" not in str(error):
            if device.type == "meta":  # there, code that reads a number, as by item(), cannot run
                return
            raise
        what = f"--global-batch-size {args.global_batch_size} is {batch_parts} parts, some of one sample"
        is_small = args.global_batch_size < 2 * batch_parts
        fix = f"give at least {2 * batch_parts}" if is_small else f"give a multiple of {batch_parts}"
        raise UserError(f"{what}, and batch norm of --model {args.model} needs two; {fix}") from None
