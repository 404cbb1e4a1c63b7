"""The options of the apex recipe, and what its four levels mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recipes.common.arguments import choice, one_of, option
from recipes.common.errors import UserError
from recipes.common.options import Options

MEANING = {
    "O0": "fp32 throughout",
    "O1": "{half} per operation over fp32 weights",
    "O2": "{half} model with fp32 master weights and fp32 batch norm",
    "O3": "{half} throughout",
}
"""What --opt-level computes in half precision."""


@dataclass(frozen=True)
class ApexOptions(Options):
    """NVIDIA apex.amp or torch.amp."""

    opt_level: str = option(
        "O1",
        one_of("O0", "O1", "O2", "O3"),
        "O0: fp32; O1: half per operation; O2: half model, fp32 master weights and batch norm; O3: half",
    )
    amp_backend: str = choice(
        "apex: NVIDIA's apex.amp; torch: torch.amp; auto: apex where it imports and there is a GPU",
        *("auto", "apex", "torch"),
    )

    def check(self) -> None:
        """Raise UserError if options do not combine."""
        super().check()
        if self.amp != "none":
            raise UserError(f"--amp {self.amp}: in this recipe only --opt-level sets the precision; drop --amp")


def summarise(args: ApexOptions, backend: str, half: torch.dtype, is_scaled: bool, why: str) -> str:
    """Return the log line with the level, the backend, the precision and the reason for the backend."""
    meaning = MEANING[args.opt_level].format(half=str(half).removeprefix("torch."))
    scaling = "dynamic loss scale" if is_scaled else "no loss scale"
    return f"{args.opt_level} by {backend}: {meaning}, {scaling} ({why})"
