"""Read the losses and the evaluation from what a script prints."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from recipes.common.errors import UserError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf"
METRICS = r"loss|acc|accuracy|perplexity|ppl|error|err|f1|auc|bleu|mse|mae|bpb|iou"
PAIR = re.compile(
    rf"(?P<name>(?:\b(?:train|training|test|val|valid|validation|eval|evaluation|average|avg|mean)[\s_/-]+)*"
    rf"(?:[A-Za-z][\w/]*[_/])?(?:{METRICS})\b(?:@\d+)?)[\"']?\s*(?:[=:]|is)?\s*(?P<value>(?:{NUMBER}))(?![\w.]*=)",
    re.IGNORECASE,
)
"""A metric's name and its number: `loss 2.3`, `test_loss=2.3`, `Test set: Average loss: 2.3`, `"loss": 2.3`."""

EVALUATION = re.compile(r"(?:^|[^a-z])(test|val|valid|validation|eval|evaluation)(?:[^a-z]|$)", re.IGNORECASE)


@dataclass
class Series:
    """The values of a metric in the order in which they are printed."""

    name: str
    is_evaluation: bool
    values: list[float] = field(default_factory=list)
    decimals: int = 0
    """The most of a value, after the point: 3 of 2.303, 9 of 1.00e-07."""
    digits: int = 1
    """The most of a value that count: 4 of 2.303, 3 of 1.00e-07."""

    def add(self, text: str) -> None:
        """Add a number as it is printed."""
        self.values.append(float(text))
        if math.isfinite(self.values[-1]):
            mantissa, _, exponent = text.lower().partition("e")
            self.decimals = max(self.decimals, len(mantissa.partition(".")[2]) - int(exponent or 0))
            self.digits = max(self.digits, len(re.sub(r"\D", "", mantissa).lstrip("0")))

    def unit(self, value: float, other: Series) -> float:
        """Return one unit of the last digit to which a value is printed, here or in the other series.

        Trailing zeros may be left out (1 and 0.9375 by print()): the series' longest numbers say how exact it is.
        """
        exponent = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else -400
        by_digits = exponent + 1 - max(self.digits, other.digits)
        return float(10.0 ** max(-max(self.decimals, other.decimals), by_digits, -300))


class Reader:
    """Collects the series of a script's output, line by line."""

    def __init__(self, pattern: str = "") -> None:
        self.pattern = re.compile(pattern) if pattern else None
        self.series: dict[str, Series] = {}

    def add(self, name: str, text: str, line: str = "") -> None:
        """Add a value to the series of its name."""
        name = re.sub(r"[\s/-]+", "_", name.lower())
        is_evaluation = bool(EVALUATION.search(name.replace("_", " ")))
        if not is_evaluation and "train" not in name and EVALUATION.search(line):
            name, is_evaluation = f"test_{name}", True
        found = self.series.setdefault(name, Series(name, is_evaluation))
        try:
            found.add(text)
        except ValueError:
            raise UserError(
                f"LOSS {self.pattern.pattern if self.pattern else ''!r} finds {text!r}, which is no number; "
                "let its group match digits only, such as ([-+.0-9e]+)"
            ) from None

    def read_json(self, value: dict[str, Any]) -> None:
        """Add the metrics of a JSON object: numbers, or lists of numbers."""
        for name, item in value.items():
            spaced = name.replace("_", " ").replace("/", " ")
            if isinstance(name, str) and re.search(rf"\b({METRICS}|losses)\b", spaced, re.IGNORECASE):
                for number in item if isinstance(item, list) else [item]:
                    if isinstance(number, int | float) and not isinstance(number, bool):
                        self.add(name.replace("losses", "loss"), repr(number), str(value.get("split", "")))

    def read(self, text: str) -> None:
        """Add what a text's lines have: JSON objects, or metrics by name or by the pattern."""
        for line in re.split(r"[\r\n]+", text):
            if line.lstrip().startswith("{"):
                try:
                    self.read_json(json.loads(line))
                    continue
                except (json.JSONDecodeError, AttributeError):
                    pass
            if self.pattern:
                for match in self.pattern.finditer(line):
                    for name, value in (match.groupdict() or {"loss": match[1]}).items():
                        if value is not None:
                            self.add(name, value)
                continue
            for match in PAIR.finditer(line):
                self.add(match["name"], match["value"], line)
