"""Mixed precision at apex.amp's four levels, by NVIDIA apex where it runs and by torch.amp elsewhere, over DDP.

    make run RECIPE=apex NODES=2
    .venv/bin/torchrun --nproc-per-node=2 -m recipes.apex.train --opt-level O2

Success: the last line is `result recipe=apex world_size=2 test_accuracy=0.98.. samples_per_s=...`.
Source: Micikevicius et al. 2018, Mixed Precision Training, https://arxiv.org/abs/1710.03740; NVIDIA/apex 25.05.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from recipes.apex.nvidia import ApexAmp, why_not_apex
from recipes.apex.options import ApexOptions, summarise
from recipes.common.arguments import is_user_code
from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.loop import Check, Technique, begin_run, load_data_and_model, train_epochs
from recipes.common.models.models import compile_forward
from recipes.common.optim import build_optimizer, optimizer_step
from recipes.common.options import HOOKED, parse
from recipes.common.parallel.buckets import build_final_buckets, check_complete, wrap_in_ddp
from recipes.common.process.entry import run_main
from recipes.common.process.signals import Stop
from recipes.common.user_code import refusal
from recipes.common.world.world import World, train_as_rank

options = partial(parse, ApexOptions, "apex", __doc__)

Pairs = Iterator[tuple[Tensor, Tensor]]
"""Tensors of the model, each with its half copy."""


def wrap(model: nn.Module, args: ApexOptions, world: World, data: Data) -> Amp:
    """Prepare the model and its optimizer for --opt-level and wrap the model in DDP; call it on all ranks."""
    check_halves(model, args)
    check_half_pass(model, args, world, data)
    why_torch = "--amp-backend torch" if args.amp_backend == "torch" else why_not_apex(args, world)
    # Apex: all ranks must use the same backend: gathers one short string per rank.
    why_torch = next(filter(None, world.gather_objects(why_torch)), "")
    if args.amp_backend == "apex" and why_torch:
        fix = "it needs apex 25.05 (recipes/apex/README.md) and a GPU a process; or use --amp-backend torch"
        raise UserError(f"--amp-backend apex: {why_torch}; {fix}")
    return TorchAmp(model, args, world, data, why_torch) if why_torch else ApexAmp(model, args, world, data)


class TorchAmp:
    """The four levels with only torch: autocast, GradScaler, and a second copy of the weights for O2."""

    def __init__(self, model: nn.Module, args: ApexOptions, world: World, data: Data, why: str) -> None:
        self.args, self.device, self.level = args, world.device, args.opt_level
        self.half = half_type(world.device)
        # DDP: with --sync-batchnorm, a layer gathers 2C + 1 floats of each rank in forward, and sums 2C in
        # backward.
        if args.sync_batchnorm:
            from recipes.common.models.batchnorm import sync_batch_norm

            model = sync_batch_norm(model, world)
        # AMP: the optimizer updates `model`, and checkpoints hold it; `working` computes. Only under O2 do they
        # differ.
        self.model = self.working = model
        if self.level == "O2":
            self.working = half_copy(model, self.half)
            # AMP: a checkpoint holds the masters, and the buffers that passes of the half copy have updated.
            model.register_state_dict_pre_hook(lambda module, prefix, keep_vars: self.take_buffers())
            model.register_load_state_dict_post_hook(lambda module, keys: self.refresh(self.buffers()))
            model.register_load_state_dict_post_hook(lambda module, keys: self.refresh(self.copies()))
        elif self.level == "O3":
            model.to(self.half).register_state_dict_post_hook(upcast)
        if self.level in ("O2", "O3"):
            # AMP: like apex's patched forward: images are cast to half, the output back to fp32.
            self.working.register_forward_pre_hook(lambda module, inputs: (to_half(inputs[0], self.half),))
            self.working.register_forward_hook(lambda module, inputs, logits: logits.float())
        self.optimizer = build_optimizer(args, model, world)
        # AMP: fp16 has no numbers below 6e-8, where many gradients lie, so the loss is scaled up before backward.
        # bfloat16 has fp32's exponent range and needs no scale; O0 and O3 have none in apex either.
        is_scaled = self.half is torch.float16 and self.level in ("O1", "O2")
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=is_scaled)
        # DDP: construction broadcasts rank 0's parameters. Backward then averages a bucket of gradients (a
        # ring all-reduce: 2 (N-1)/N of its bytes per rank) while the layers before it are still computing.
        # AMP: gradients have the type of the weights: 4 bytes each under O0 and O1, 2 under O2 and O3.
        self.ddp = wrap_in_ddp(self.working, args, world.device)
        if args.deterministic:
            build_final_buckets(self.ddp, data, world.device)
        compile_forward(self.working, args)  # DDP: not the wrapper, as in recipes/ddp
        self.eval_model = self.ddp  # DDP: exchanges nothing without gradients
        self.summary = summarise(args, "torch.amp", self.half, is_scaled, why)

    def autocast(self) -> torch.autocast:
        """Return the context for forward passes: under O1, autocast picks each operation's dtype."""
        return torch.autocast(self.device.type, dtype=self.half, enabled=self.level == "O1")

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward exchanges no gradients."""
        return self.ddp.no_sync()

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Scale the loss and accumulate its gradients."""
        self.scaler.scale(loss).backward()
        if is_last:
            check_complete(self.ddp)

    def step(self, job: Job, check: Check) -> None:
        """Update the weights, unless a gradient has overflowed; ranks see the same averages, so they agree."""
        # AMP: half gradients are cast to fp32 gradients of the masters, which GradScaler then unscales.
        for master, half in self.copies():
            master.grad = None if half.grad is None else half.grad.float()
            half.grad = None
        parameters = self.model.parameters()
        job.grad_norm = optimizer_step(self.args, parameters, self.optimizer, self.scaler, check)
        self.refresh(self.copies())

    @torch.no_grad()
    def refresh(self, pairs: Pairs) -> None:
        """Copy masters into their half copies, after a step and after a checkpoint is loaded."""
        for master, half in pairs:
            half.copy_(master)

    @torch.no_grad()
    def take_buffers(self) -> None:
        """Copy the buffers that passes have changed into the model's, before a checkpoint is written."""
        for own, half in self.buffers():
            if not torch.equal(own.to(half.dtype), half):  # a constant keeps its fp32 value
                own.copy_(half)

    def copies(self) -> Pairs:
        """Yield each master weight with its half copy (only under O2, and not for batch norm)."""
        pairs = zip(self.model.parameters(), self.working.parameters(), strict=True)
        return ((master, half) for master, half in pairs if master is not half)

    def buffers(self) -> Pairs:
        """Yield the model's buffers with their half copies, without those that passes make, drop or resize."""
        halves = dict(self.working.named_buffers())
        for name, own in self.model.named_buffers():
            half = halves.get(name, own)
            if half is not own and half.shape == own.shape:
                yield own, half


def half_type(device: torch.device) -> torch.dtype:
    """Return float16 for a GPU, like apex, and bfloat16 for a CPU, which has no fast float16."""
    return torch.float16 if device.type == "cuda" else torch.bfloat16


def to_half(inputs: Tensor, half: torch.dtype) -> Tensor:
    """Cast images to half precision; return tokens, which are integers, unchanged."""
    return inputs.to(half) if inputs.is_floating_point() else inputs


def check_halves(model: nn.Module, args: ApexOptions) -> None:
    """Raise UserError if O2 or O3 would drop imaginary parts or a gradient's hook, or cannot add theirs."""
    if args.opt_level not in ("O2", "O3"):
        return
    flag, model_name = f"--opt-level {args.opt_level}", f"--model {args.model}"
    if isinstance(model, torch.jit.ScriptModule):
        fix = "return the module itself, or use O0 or O1"
        raise UserError(f"{flag}: {model_name} is TorchScript, which takes no hooks; {fix}")
    if args.opt_level == "O2" and (hooked := getattr(model, HOOKED, None)):
        what = f"{hooked[0]} of {model_name} has a gradient hook, and its half copy does not"
        raise UserError(f"{flag}: {what}; use another level")
    named = (*model.named_parameters(), *model.named_buffers())
    if found := [name for name, tensor in named if tensor.is_complex()]:
        raise UserError(f"{flag}: {found[0]} of {model_name} is complex, and half is not; use O0 or O1")


def check_half_pass(model: nn.Module, args: ApexOptions, world: World, data: Data) -> None:
    """Raise UserError if O2 or O3 is given and the user's model, which fits, fails in half precision.

    It does if its forward() casts to fp32: a layer whose weights are half does not take that.
    """
    if args.opt_level not in ("O2", "O3") or not is_user_code(args.model):
        return
    half = half_type(world.device)
    try:
        inputs = to_half(data.examples(2)[0].to(world.device), half)
        with torch.no_grad():
            half_copy(model, half).eval()(inputs)
    except Exception as error:
        fix = "cast to the dtype of the next layer's weights, or use O0 or O1"
        what = f"--opt-level {args.opt_level}: --model {args.model} fails in half precision"
        raise refusal(what, error, fix) from error
    model.train()  # the copy shares its batch norm


def half_copy(model: nn.Module, half: torch.dtype) -> nn.Module:
    """Return a half-precision copy of the model that shares the model's fp32 batch-norm layers."""
    # AMP: half has too few digits for batch norm's sums over the batch and its running averages.
    working = copy.deepcopy(model).to(half)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            working.set_submodule(name, module)
    return working


def upcast(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Cast a state_dict() to fp32, so that a checkpoint of O3 fits every other level and recipe."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    state.update({name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()})


Amp = TorchAmp | ApexAmp


def train(args: ApexOptions, world: World, stop: Stop) -> None:
    """Train with the given options; call it on all ranks."""
    data, model = load_data_and_model(args, "apex", world, stop)
    with world.watch("model", computes=True):
        amp = wrap(model, args, world, data)
    scaler = cast(torch.amp.GradScaler, amp.scaler)
    job = Job(args, "apex", data, world, amp.model, amp.optimizer, scaler, stop)

    def forward_backward(inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        """Accumulate the gradients of one pass; return this rank's part of the loss."""
        # DDP: gradients are exchanged only in the last of the accumulated passes, while backward runs.
        with world.watch("gradients", computes=True) if is_last else amp.no_sync():
            with amp.autocast():
                loss = job.loss(amp.ddp(inputs), targets)
            # DDP: gradients are averaged over the ranks; this factor makes the result the global batch's mean.
            amp.backward(loss * world.world_size, is_last)
        return loss.detach()

    def predict(inputs: Tensor) -> Tensor:
        """Return the model's output, such as logits (B, classes) for images."""
        with amp.autocast():
            return amp.eval_model(inputs)

    # DDP: rank 0 reads the checkpoint and broadcasts it. All ranks hold the same weights: rank 0 writes them.
    begin_run(job)
    job.say(amp.summary)
    train_epochs(job, Technique(forward_backward, amp.ddp, predict, amp.step))
    job.finish()


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the options in argv; call it on every rank."""
    # DDP: a launcher (torchrun, srun, mpirun) gives each process its rank.
    train_as_rank("apex", options(argv), train)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
