"""The task of language models: the next token at each place, and text that a trained model writes."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.common.task import SKIPPED, Task

SAMPLE_BYTES, TEMPERATURE = 256, 0.8


class LanguageModel(Task):
    """The next token at each position: logits (B, T, vocabulary) and tokens, int64 of shape (B, T).

    The loss, in nats, is the mean over the positions of a batch; those whose target is SKIPPED do not count.

    Args:
        seq_len: T, the tokens of a sample.
        token: the name of a token, for the metric test_bits_per_TOKEN; with "byte", `sample` returns text.
        seed: the seed of the sampled text.
    """

    unit = "tokens"

    def __init__(self, seq_len: int, token: str = "byte", seed: int = 0) -> None:
        self.units_per_sample, self.token, self.seed = seq_len, token, seed
        self.headline = f"bits_per_{token}"

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross entropy, summed over the positions that count, in samples of T positions."""
        total = functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=SKIPPED
        )
        return total / target.shape[1]

    def count(self, target: Tensor) -> Tensor:
        """Return how many positions count, in samples of T positions."""
        return (target != SKIPPED).sum(dtype=torch.float64) / target.shape[1]

    def derive(self, averages: dict[str, float]) -> dict[str, float]:
        """Return the bits per token that a code based on the model's predictions needs."""
        return {self.headline: averages["loss"] / math.log(2)}

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """Return text that the model generates after a newline; "" if tokens are not bytes."""
        if self.token != "byte":
            return ""
        written = generate(
            model, b"\n", min(SAMPLE_BYTES, 2 * self.units_per_sample), self.units_per_sample, self.seed, device
        )
        text = written.decode(errors="replace").strip()  # escape sequences would change the terminal
        return "a sample of what the model writes:\n" + re.sub(r"[^\n\t -~\u00a0-\U0010ffff]", "\ufffd", text)


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, seq_len: int, seed: int, device: torch.device) -> bytes:
    """Return `count` bytes sampled one after another, each given at most seq_len bytes before it.

    They are sampled from the logits divided by TEMPERATURE: the same bytes for the same weights and seed. As in
    training, the model always gets seq_len bytes: zeros pad a shorter text, and no position looks ahead at them.
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
