"""The task of language models: the next token at each place, and text that a trained model writes."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.common.task import Task

SAMPLE_BYTES, TEMPERATURE = 256, 0.8


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
        text = written.decode(errors="replace").strip()  # escape sequences would change the terminal
        return "a sample of what the model writes:\n" + re.sub(r"[^\n\t -~\u00a0-\U0010ffff]", "\ufffd", text)


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
