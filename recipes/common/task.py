"""What a model is trained for: how its output and the target become a loss and metrics.

Everything is a sum over the samples of a batch. Sums may be added over batches and ranks, averages may not. A task
of your own is a subclass of Task: --task package.module:Class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.common.errors import UserError
from recipes.common.options import Options, is_reference
from recipes.common.user_code import call, load

SKIPPED = -100
"""Label of a sample that does not count: cross_entropy's default ignore_index."""


class Task:
    """The loss and the metrics of a task; subclasses give `loss_sum` and what else they need."""

    metrics: Sequence[str] = ()
    """Names of what `metric_sums` returns; their averages are recorded as test_NAME."""
    headline: str = "loss"
    """The average (loss, a metric, or one that `derive` adds) that a run ends with and that chooses best.pt."""
    higher_is_better: bool = False
    """Of the headline."""
    unit: str = "samples"
    """What speed is also measured in, where a sample has many of them: tokens."""
    units_per_sample: int = 1

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss, summed over the samples of a batch: a scalar that gradients come from.

        Args:
            output: what the model returns, float32; the first dimension counts samples.
            target: of the same samples.
        """
        raise NotImplementedError

    def metric_sums(self, output: Tensor, target: Tensor) -> Sequence[Tensor]:
        """Return each of `metrics`, summed over the samples of a batch: scalars."""
        return ()

    def count(self, target: Tensor) -> Tensor | int:
        """Return how many samples of a batch count (default: all)."""
        return len(target)

    def derive(self, averages: dict[str, float]) -> dict[str, float]:
        """Return what else follows from the averages of all samples, such as the root of a squared error."""
        return {}

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """Return something that the trained model has made, to print on rank 0 at a run's end ("": nothing)."""
        return ""


class Classification(Task):
    """One class for each sample: logits (B, classes) and class numbers, int64 of shape (B,).

    Args:
        label_smoothing: the share of a target that is spread over all classes; evaluation's loss has it too.
    """

    metrics = ("accuracy",)
    headline = "accuracy"
    higher_is_better = True
    label_smoothing = 0.0  # of a subclass with another __init__()

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross entropy, summed over the samples that are not SKIPPED."""
        smoothing = self.label_smoothing
        return functional.cross_entropy(
            output, target, reduction="sum", ignore_index=SKIPPED, label_smoothing=smoothing
        )

    def metric_sums(self, output: Tensor, target: Tensor) -> Sequence[Tensor]:
        """Return the number of samples whose largest logit is that of their class."""
        return ((output.argmax(dim=1) == target).sum(),)

    def count(self, target: Tensor) -> Tensor:
        """Return how many samples have a class."""
        return (target != SKIPPED).sum()


class LanguageModel(Task):
    """The next token at each place: logits (B, T, vocabulary) and tokens, int64 of shape (B, T).

    A sample's loss is the mean of its T places, all of which count, in nats.

    Args:
        seq_len: T, the tokens of a sample.
        token: what a token is; "byte" makes the metric test_bits_per_byte, and lets `sample` print text.
        seed: of the text that is sampled.
    """

    unit = "tokens"

    def __init__(self, seq_len: int, token: str = "byte", seed: int = 0) -> None:
        self.units_per_sample, self.token, self.seed = seq_len, token, seed
        self.headline = f"bits_per_{token}"

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross entropy, averaged over a sample's places and summed over the samples."""
        total = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
        return total / target.shape[1]

    def derive(self, averages: dict[str, float]) -> dict[str, float]:
        """Return the bits that a code needs for a token if it follows the model's predictions."""
        return {self.headline: averages["loss"] / math.log(2)}

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """Return text that the model writes, starting from a new line."""
        if self.token != "byte":
            return ""
        written = generate(
            model, b"\n", min(SAMPLE_BYTES, 2 * self.units_per_sample), self.units_per_sample, self.seed, device
        )
        return f"a sample of what the model writes:\n{written.decode(errors='replace').strip()}"


SAMPLE_BYTES, TEMPERATURE = 256, 0.8


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, seq_len: int, seed: int, device: torch.device) -> bytes:
    """Return `count` bytes drawn one after another, each given at most seq_len before it.

    They are drawn from the logits divided by TEMPERATURE, the same for the same weights and seed. The model gets
    seq_len bytes at each time, as in training: zeros follow those that there are, which no place looks ahead at.
    """
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    text = bytearray(prompt)
    for _ in range(count):
        given = text[-seq_len:]
        padded = torch.tensor([list(given.ljust(seq_len, b"\0"))], device=device)
        chances = (model(padded)[0, len(given) - 1].float().cpu() / TEMPERATURE).softmax(dim=0)
        text.append(int(chances.multinomial(1, generator=generator)))
    return bytes(text[len(prompt) :])


def build_task(args: Options, kind: str, shape: Sequence[int]) -> Task:
    """Return --task, or what the targets of the data are for, by their kind and a sample's shape.

    Raises:
        UserError: the task does not go with the data, or is none.
    """
    if args.label_smoothing and (is_reference(args.task) or kind != "class"):
        raise UserError(f"--label-smoothing {args.label_smoothing} is for --task classification; drop it")
    if is_reference(args.task):
        task = call(f"--task {args.task}", load("--task", args.task))
        if not isinstance(task, Task):
            fix = "give a subclass of recipes.common.task.Task, without arguments"
            raise UserError(f"--task {args.task} makes a {type(task).__name__}; {fix}")
        return task
    if kind == "values" and args.task == "auto":
        fix = "add --task package.module:Class (docs/your-model.md)"
        raise UserError(f"--data {args.data}: no built-in task takes values; {fix}")
    needed = "classification" if kind == "class" else "language-model"
    if args.task not in ("auto", needed) or kind == "values":
        raise UserError(f"--task {args.task} does not go with --data {args.data}, whose targets are {kind}")
    if needed == "classification":
        return Classification(args.label_smoothing)
    if len(shape) != 1:
        raise UserError(f"--data {args.data}: targets of shape {shape}; tokens have the shape (T,)")
    return LanguageModel(shape[0], kind.removesuffix("s"), args.seed)
