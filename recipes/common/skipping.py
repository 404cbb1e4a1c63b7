"""--on-nonfinite skip: leave out a step whose loss or gradient is not finite, on all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recipes.common.nonfinite import Guard, total_norm

MOST_IN_A_ROW = 10
"""Consecutive steps to skip before the job fails: by then the weights are at fault."""


class SkippingGuard(Guard):
    """Skip steps that are not finite, up to MOST_IN_A_ROW one after another."""

    _in_a_row = 0
    _kept: Sequence[tuple[nn.Module, str, Tensor, Tensor]] = ()
    _scale: float | None = None

    def check_gradients(self, step: int, loss: Tensor, gradients: Sequence[Tensor]) -> bool:
        """Return whether the weights may be changed; checks all gradients, which are the same on all ranks."""
        if torch.isfinite(total_norm(gradients)):
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            hint = f"so were the {MOST_IN_A_ROW} before it, which were skipped"
            self.fail(step, not bool(torch.isfinite(loss)), hint)
        else:
            self.skipped += 1
        return False

    def keep_buffers(self, model: nn.Module) -> None:
        """Copy, before a step's passes, the buffers that they change, such as batch norm's running statistics."""
        self._kept = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._scale = self.scaler.get_scale() if self._scale is None else self._scale

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore the copies after a step that the scaler or check_gradients() has skipped."""
        before, self._scale = self._scale, self.scaler.get_scale()
        if self._in_a_row or (before is not None and self._scale < before):
            for module, name, buffer, copy in self._kept:
                buffer.copy_(copy)
                setattr(module, name, buffer)  # forward() may have put another tensor in its place

    def check_loss(self, step: int, loss: float) -> None:
        """Do nothing: the loss of a skipped step may be not finite."""
