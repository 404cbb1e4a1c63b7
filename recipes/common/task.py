"""What a model is trained for: how its output and the target become a loss and metrics.

All values are sums over the samples of a batch: sums can be added over batches and ranks, averages cannot. A task
of your own is a subclass of Task: --task package.module:Class.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

SKIPPED = -100
"""Class or token of a target that does not count: cross_entropy's default ignore_index."""


class Task:
    """The loss and the metrics of a task; subclasses define `loss_sum` and, if needed, the other methods."""

    metrics: Sequence[str] = ()
    """Names of what `metric_sums` returns; their averages are recorded as test_NAME."""
    headline: str = "loss"
    """The average (loss, a metric, or one that `derive` adds) that is a run's result and selects best.pt."""
    higher_is_better: bool = False
    """Whether a higher headline is better."""
    unit: str = "samples"
    """The unit of a second figure for speed, if a sample has several of them, such as tokens."""
    units_per_sample: int = 1

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss, summed over the samples of a batch: a differentiable scalar.

        Args:
            output: what the model returns, float32 or complex; the first dimension counts samples.
            target: the targets of the same samples.
        """
        raise NotImplementedError

    def metric_sums(self, output: Tensor, target: Tensor) -> Sequence[Tensor]:
        """Return the value of each of `metrics`, summed over the samples of a batch: scalars."""
        return ()

    def count(self, target: Tensor) -> Tensor | int:
        """Return by what a batch's sums are divided for their means (default: the number of samples)."""
        return len(target)

    def derive(self, averages: dict[str, float]) -> dict[str, float]:
        """Return more values computed from the averages over all samples, such as a root mean squared error."""
        return {}

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """Return text made by the trained model, to print on rank 0 at a run's end ("": print nothing)."""
        return ""


def in_float(output: Tensor) -> Tensor:
    """Return a model's output as a loss gets it: in float32, or as it is if it is complex."""
    return output if output.is_complex() else output.float()


def has_own(task: Task, method: str) -> bool:
    """Return whether a task overrides this method of Task."""
    return getattr(getattr(task, method), "__func__", None) is not getattr(Task, method)


class Classification(Task):
    """One class for each sample: logits (B, classes) and class numbers, int64 of shape (B,).

    Args:
        label_smoothing: the share of a target that is spread over all classes, in the evaluation loss, too.
    """

    metrics = ("accuracy",)
    headline = "accuracy"
    higher_is_better = True
    label_smoothing = 0.0  # for subclasses whose __init__() does not set it

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross entropy, summed over the samples that are not SKIPPED."""
        smoothing = self.label_smoothing
        return functional.cross_entropy(
            output, target, reduction="sum", ignore_index=SKIPPED, label_smoothing=smoothing
        )

    def metric_sums(self, output: Tensor, target: Tensor) -> Sequence[Tensor]:
        """Return the number of correct predictions (argmax equals the target)."""
        return ((output.argmax(dim=1) == target).sum(),)

    def count(self, target: Tensor) -> Tensor:
        """Return how many samples have a class."""
        return (target != SKIPPED).sum()
