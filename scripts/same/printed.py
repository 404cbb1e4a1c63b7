"""Read the losses and the evaluation from what a script prints."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

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
    values: list[float] = field(default_factory=list)
    decimals: int = 0
    """The most of a value, after the point: 3 of 2.303, 9 of 1.00e-07."""
    digits: int = 1
    """The most of a value that count: 4 of 2.303, 3 of 1.00e-07."""

    @property
    def is_evaluation(self) -> bool:
        """Whether the values are of test or validation data."""
        return bool(EVALUATION.search(self.name))

    def add(self, text: str) -> None:
        """Add a number as it is printed; raises ValueError for anything else."""
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

    def excess(self, value: float, right: float, other: Series) -> float:
        """Return by how much the other series' value differs from this one's, besides a unit of its last digit.

        It is inf where only one of them is finite, and 0 where both are the same infinity, or no number.
        """
        if math.isfinite(value) and math.isfinite(right):
            return abs(value - right) - 1.01 * self.unit(right, other)
        return 0.0 if str(value) == str(right) else math.inf

    def excesses(self, other: Series) -> list[float]:
        """Return the excess of each value that both series have."""
        return [self.excess(*pair, other) for pair in zip(other.values, self.values, strict=False)]


def read_series(text: str, pattern: str = "") -> dict[str, Series]:
    """Return the metrics of a text's lines by name; raises UserError where the pattern finds what is no number."""
    found: dict[str, Series] = {}
    for line in re.split(r"[\r\n]+", text):
        for name, value in read_line(line, pattern):
            try:
                found.setdefault(name, Series(name)).add(value)
            except ValueError:
                raise UserError(
                    f"LOSS {pattern!r} finds {value!r}, which is no number; "
                    "let its group match digits only, such as ([-+.0-9e]+)"
                ) from None
    return found


def read_line(line: str, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the names and numbers of a line: a JSON object's, else those that the pattern finds or usual names."""
    if line.lstrip().startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            metrics = json.loads(line)
            for name, item in metrics.items():
                if re.search(rf"\b({METRICS}|losses)\b", re.sub("[_/]", " ", name), re.IGNORECASE):
                    for number in item if isinstance(item, list) else [item]:
                        if isinstance(number, int | float) and not isinstance(number, bool):
                            yield (
                                full_name(name.replace("losses", "loss"), str(metrics.get("split"))),
                                repr(number),
                            )
            return
    if pattern:
        for match in re.finditer(pattern, line):
            for name, value in (match.groupdict() or {"loss": match[1]}).items():
                if value is not None:
                    yield full_name(name), value
        return
    for match in PAIR.finditer(line):
        yield full_name(match["name"], line), match["value"]


def full_name(name: str, context: str = "") -> str:
    """Return a metric's name in lower case, with test_ where only its context says that it is an evaluation's."""
    name = re.sub(r"[\s/-]+", "_", name.lower())
    is_marked = EVALUATION.search(name) or "train" in name
    return f"test_{name}" if EVALUATION.search(context) and not is_marked else name
