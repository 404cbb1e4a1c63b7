"""A loss or gradient that is not finite: stop on all ranks alike, or (skipping.py) skip the step.

Each step checks the averaged gradients. They are the same on all ranks, and not finite if any rank's loss is not.
So all ranks decide alike without another exchange.

Reading all gradients once more takes several percent of a step on a CPU. For `stop`, the first layer's gradients
are enough: backward reaches this layer last, through all others. A non-finite gradient in another layer alone
corrupts the weights, and with them the next step's loss; and corrupt weights are never saved (job.py). Nor are
corrupt buffers: if activations overflow, batch norm's running statistics do, too, although a loss scaler skips the
step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipes.common.errors import UserError
from recipes.common.process.signals import Stop
from recipes.common.watch.report import name_ranks

MIN_LOSS_SCALE = 1.0
"""Below this loss scale, even unscaled gradients overflow: from 2^16, 17 bad steps in a row lead there."""

FIX = "lower --lr, set --clip-grad-norm, or see docs/failures.md; --resume auto uses the last checkpoint"


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients; torch 2.11 cannot compute it if one of them is sparse."""
    return nn.utils.get_total_norm([each.coalesce().values() if each.is_sparse else each for each in gradients])


def are_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return for each tensor whether all of its values are finite: a tensor of bools."""
    parts = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors)
    sums = [part.sum(dtype=torch.float32) for part in parts]  # not of squares, which overflow earlier
    return torch.isfinite(torch.stack([value.to(sums[0].device) for value in sums]))  # to read the GPU once


def finite_buffers(buffers: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Return the names of floating-point buffers whose values are all finite; a mask's may not be."""
    own = {
        name: buffer
        for name, buffer in buffers
        if type(buffer) is Tensor and buffer.layout is torch.strided and buffer.is_floating_point()
    }
    return set(itertools.compress(own, are_finite(own.values()).tolist())) if own else set()


class NonFiniteError(UserError):
    """The loss or a gradient is not finite, and --on-nonfinite says what to do about it.

    Args:
        step: the number of the step, from 1.
        is_loss: whether this rank's loss is not finite, or only a gradient.
        hint: the consequence, and how to fix it.
        ranks: all ranks whose loss is not finite, once they are known.
    """

    status = 1

    def __init__(self, step: int, is_loss: bool, hint: str, ranks: Sequence[int] = ()) -> None:
        names = f" on {name_ranks(ranks)}" if ranks else ""
        super().__init__(f"{'the loss' if is_loss else 'a gradient'} of step {step} is not finite{names}; {hint}")
        self.step, self.is_loss, self.hint = step, is_loss, hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild this error on another rank, without `ranks`."""
        return NonFiniteError, (self.step, self.is_loss, self.hint)


class Guard:
    """Stop the job after a step that was not finite: --on-nonfinite stop (skipping.py: skip)."""

    skipped = 0
    """Number of skipped steps."""

    def __init__(self, device: torch.device, stop: Stop, scaler: torch.amp.GradScaler) -> None:
        self.stop, self.scaler = stop, scaler
        # A GPU keeps the first bad step in its memory; it is read only when the host waits for the GPU anyway.
        self._is_lazy = device.type != "cpu"
        self._first_bad = torch.full((), -1, device=device)
        self._bad_loss = torch.zeros((), dtype=torch.bool, device=device)

    def check_gradients(self, step: int, loss: Tensor, gradients: Sequence[Tensor]) -> bool:
        """Return whether the weights may be changed in a step, counted from 1.

        `loss` is this rank's part of the loss. The averaged gradients are the same on all ranks, the first layer's
        first.
        """
        norm = gradients[0].norm() if gradients else torch.zeros(())
        is_bad = ~torch.isfinite(norm)
        if self._is_lazy:
            is_bad = is_bad.to(self._first_bad.device)  # a pipeline's first parameter may be on another GPU
            is_first = is_bad & (self._first_bad < 0)
            self._first_bad = torch.where(is_first, step, self._first_bad)
            self._bad_loss = torch.where(is_first, ~torch.isfinite(loss), self._bad_loss)
            return True
        if is_bad:
            self.fail(step, not bool(torch.isfinite(loss)), "the step was not done")
        return not is_bad

    def keep_buffers(self, model: nn.Module) -> None:
        """Do nothing before a step's passes: no step is skipped."""

    def restore_buffers(self) -> None:
        """Do nothing after the step."""

    def read_back(self, step: int) -> None:
        """Read the first bad step from a GPU, and the loss scale; the caller waits for the GPU anyway."""
        if (first_bad := int(self._first_bad)) >= 0:
            self.fail(first_bad, bool(self._bad_loss), "no checkpoint was written since")
        if (scale := self.scaler.get_scale()) < MIN_LOSS_SCALE:  # it is 1 if the scaler is disabled
            self.fail(step, False, f"the loss scale has collapsed to {scale:.2g}, so steps change nothing")

    def is_sound(self, step: int, weights: Iterable[Tensor], lost_buffers: Sequence[str] = ()) -> bool:
        """Return whether the state after a step may be saved; if not, the error becomes this rank's vote.

        `lost_buffers` are the names of those that were finite before the training and are not now.
        """
        if isinstance(self.stop.error, NonFiniteError):
            return False
        if not are_finite(weights).all():
            self.fail(step, False, "it has corrupted the weights, which are not saved")
            return False
        if lost_buffers:
            what = f"the buffer {lost_buffers[0]} is not finite after step {step}, and is not saved"
            fix = "if that is on purpose, register it with persistent=False; if not"
            self.stop.fail(UserError(f"{what}: {fix}, {FIX}", is_passing=True))
        return not lost_buffers

    def check_loss(self, step: int, loss: float) -> None:
        """Fail if the global batch's loss is not finite: a loss scaler skips such gradients without this check."""
        if not math.isfinite(loss):
            self.fail(step, False, "nor is the loss of the global batch")

    def fail(self, step: int, is_loss: bool, hint: str) -> None:
        """Make this step's error the rank's vote."""
        self.stop.fail(NonFiniteError(step, is_loss, f"{hint}: {FIX}"))
