"""NVIDIA apex 25.05's amp and DistributedDataParallel: the last release that has amp, for GPUs only."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.apex.options import ApexOptions, summarise
from recipes.common.data import Data
from recipes.common.job import Job
from recipes.common.loop import Check
from recipes.common.optim import build_optimizer, optimizer_step, parameter_indices
from recipes.common.parallel.buckets import build_final_buckets
from recipes.common.world.world import World


def why_not_apex(args: ApexOptions, world: World) -> str:
    """Return the reason why this rank cannot use apex.amp, or "" if it can."""
    if world.device.type != "cuda":
        return "apex.amp takes CUDA tensors only, and this run is on the CPU"
    if args.compile:
        return "apex.amp patches functions of torch, which --compile does not see"
    spec = importlib.util.find_spec("apex")
    folders = spec.submodule_search_locations or [] if spec else []
    if not any((Path(folder) / "amp").is_dir() for folder in folders):
        return "no apex.amp is installed: PyPI's apex is another project, and NVIDIA's has none after 25.05"
    try:
        importlib.import_module("apex.amp")
        importlib.import_module("apex.parallel")
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"the installed apex does not import: {' '.join(str(error).split())}"
    return ""


class ApexAmp:
    """The four levels with NVIDIA apex 25.05, the last release with amp; only this file calls apex."""

    def __init__(self, model: nn.Module, args: ApexOptions, world: World, data: Data) -> None:
        from apex import amp, parallel

        # Apex: each of its modules warns that it is deprecated; README.md names the replacements.
        warnings.filterwarnings("ignore", "apex.* is deprecated", FutureWarning)
        self.args, self.apex_amp = args, amp
        if args.sync_batchnorm:
            # Apex: a batch-norm layer gathers 2C + 1 floats of each rank in forward, and sums 2C in backward.
            model = parallel.convert_syncbn_model(model)
        optimizer = build_optimizer(args, model, world)
        # Apex: initialize() needs a model on its GPU and an optimizer with parameters, and comes before DDP. O1
        # patches torch's functions for the whole process; O2 and O3 cast the model and patch its forward.
        self.model, self.optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
        # Apex: under O2 the first zero_grad() puts fp32 masters into the optimizer, where restore() needs them.
        self.optimizer.zero_grad()
        keep_masters(self.model, self.optimizer, amp.master_params)
        self.scaler = ApexScaler(amp, is_dynamic=args.opt_level in ("O1", "O2"))
        # Apex: construction broadcasts rank 0's parameters. Backward averages flat buckets of 10 M gradients in
        # the weights' dtype while it runs. delay_allreduce=True would send them all after backward: that takes
        # longer, but allows parameters without a gradient.
        self.ddp = parallel.DistributedDataParallel(self.model, delay_allreduce=False)
        if args.deterministic:
            build_final_buckets(self.ddp, data, world.device)
        self.eval_model = self.model  # Apex: the forward pass of its DDP prepares for a backward pass
        why = "--amp-backend apex" if args.amp_backend == "apex" else "apex.amp imports and there is a GPU"
        self.summary = summarise(args, "apex.amp", torch.float16, self.scaler.is_dynamic, why)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: initialize() has already patched the functions that cast."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward exchanges no gradients."""
        self.ddp.disable_allreduce()
        yield
        self.ddp.enable_allreduce()

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Scale the loss and accumulate its gradients."""
        # Apex: leaving the context unscales the gradients, under O2 into the fp32 masters. Earlier passes must not
        # unscale, because DDP averages the sum of all passes during the last one.
        with self.apex_amp.scale_loss(loss, self.optimizer, delay_unscale=not is_last) as scaled_loss:
            scaled_loss.backward()

    def step(self, job: Job, check: Check) -> None:
        """Update the weights, unless a gradient has overflowed: then apex has replaced the step with a no-op."""
        # Apex: it checks gradients only with a dynamic loss scale (O1, O2); the run's own check covers O0 and O3.
        check = (lambda gradients: True) if self.scaler.is_dynamic else check
        no_scaler = torch.amp.GradScaler(enabled=False)  # Apex: backward() has already unscaled
        masters = self.apex_amp.master_params(self.optimizer)
        job.grad_norm = optimizer_step(self.args, masters, self.optimizer, no_scaler, check)


def keep_masters(
    model: nn.Module, optimizer: torch.optim.Optimizer, master_params: Callable[..., Iterator[Tensor]]
) -> None:
    """Make the model's state_dict() return, and its load_state_dict() fill, the fp32 masters."""

    def named_masters() -> Iterator[tuple[str, Tensor]]:
        names = [name for name, _ in model.named_parameters()]
        masters = zip(parameter_indices(optimizer), master_params(optimizer), strict=True)
        return ((names[place], master) for place, master in masters)

    # Apex: without this hook, state_dict() casts the half weights up and loses the 13 bits that only the masters
    # have. A run that resumes from those weights would differ from one that continues.
    def give_masters(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for name, master in named_masters():
            state[name] = master.detach().float()

    @torch.no_grad()
    def take_masters(module: nn.Module, state: dict[str, Any], *unused: Any) -> None:
        for name, master in named_masters():
            master.copy_(state[name])

    model.register_state_dict_post_hook(give_masters)
    model.register_load_state_dict_pre_hook(take_masters)


class ApexScaler:
    """apex's loss scale behind GradScaler's interface: 2^16, halved on overflow, doubled after 2000 steps."""

    def __init__(self, amp: Any, is_dynamic: bool) -> None:
        self.amp, self.is_dynamic = amp, is_dynamic

    def get_scale(self) -> float:
        """Return the loss scale, or 1 if there is none."""
        return float(self.amp.state_dict()["loss_scaler0"]["loss_scale"]) if self.is_dynamic else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the keys of GradScaler.state_dict(), so that either backend loads the other's checkpoints."""
        if not self.is_dynamic:
            return {}
        own = self.amp.state_dict()["loss_scaler0"]
        rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        return {"scale": own["loss_scale"], **rule, "_growth_tracker": own["unskipped"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loss scale from a checkpoint of either backend."""
        if self.is_dynamic:
            own = {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}
            self.amp.load_state_dict({"loss_scaler0": own})
