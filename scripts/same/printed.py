"""Read the losses and the evaluation from what a script prints."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from recipes.common.errors import UserError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf"
METRICS = r"loss(?:[_/](?!scale)[a-z]+)*|acc|accuracy|perplexity|ppl|error|err|f1|auc|bleu|mse|mae|bpb|iou"
PAIR = re.compile(
    rf"(?P<name>(?:\b(?:train|training|test|val|valid|validation|eval|evaluation|average|avg|mean)[\s_/-]+)*"
    rf"(?:[A-Za-z][\w/]*[_/])?(?:{METRICS})\b(?:@\d+)?)[\"']?\s*(?:[=:]|is)?\s*"
    rf"(?:[\"']|(?:tensor|np\.float\d+)\()?(?P<value>(?:{NUMBER}))(?![\w.]*=)",
    re.IGNORECASE,
)
"""A metric's name and its number: `Loss_D: 2.3`, `test_loss=2.3`, `Test set: Average loss: 2.3`, `"loss": 2.3`.

Or its text or representation: `'loss': '2.3'`, `loss tensor(2.3)`, `loss=np.float64(2.3)`.
"""

BAR = re.compile(
    r".*(?:\d+%\|[#\d ▏▎▍▌▋▊▉█]*\|.*|"
    r"\[(?:\d+:)?\d\d:\d\d(?:<[\d:?]+)?, +[\d.?]+[^\s,\]]*/[^]]*\]|\d[A-Za-z]+ \[(?:\d+:)?\d\d:\d\d, [^]]*\])"
)
"""tqdm's progress bar, which shows as many values as the time allows. What is printed after it is in its line."""

EVALUATION = re.compile(r"(?:^|[^a-z])(test|val|valid|validation|eval|evaluation)(?:[^a-z]|$)", re.IGNORECASE)


@dataclass
class Series:
    """The values of a metric in the order in which they were printed."""

    name: str
    values: list[float] = field(default_factory=list)
    decimals: int = 0
    """The largest number of decimals of a value: 3 in 2.303, 9 in 1.00e-07."""
    digits: int = 1
    """The largest number of significant digits of a value: 4 in 2.303, 3 in 1.00e-07."""

    @property
    def is_evaluation(self) -> bool:
        """Whether the values are of test or validation data."""
        return bool(EVALUATION.search(self.name))

    def add(self, text: str) -> None:
        """Add a printed number; raises ValueError if the text is not a number."""
        self.values.append(float(text))
        if math.isfinite(self.values[-1]):
            number = Decimal(text).as_tuple()
            self.decimals = max(self.decimals, -int(number.exponent))
            self.digits = max(self.digits, len(number.digits))

    def unit(self, value: float, other: Series) -> float:
        """Return one unit of a value's last printed digit, by the precision of this and the other series.

        Trailing zeros may be missing (print() gives 1 and 0.9375), so the longest numbers show the precision.
        """
        exponent = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else -400
        by_digits = exponent + 1 - max(self.digits, other.digits)
        return float(10.0 ** max(-max(self.decimals, other.decimals), by_digits, -300))

    def excess(self, value: float, right: float, other: Series) -> float:
        """Return how far the other series' value is from this one's (right), less a unit of the last digit.

        It is 0 if both are the same infinity or both NaN, and inf if they differ and one of them is not finite.
        """
        if math.isfinite(value) and math.isfinite(right):
            return abs(value - right) - 1.01 * self.unit(right, other)
        return 0.0 if str(value) == str(right) else math.inf

    def excesses(self, other: Series) -> list[float]:
        """Return the excess of each pair of values that both series have."""
        return [self.excess(*pair, other) for pair in zip(other.values, self.values, strict=False)]


def read_series(text: str, pattern: str = "", is_report: bool = False) -> dict[str, Series]:
    """Return the metrics in a text by name; raises UserError if the pattern matches anything but numbers.

    If is_report, the text was written to be compared: all numbers in JSON are metrics.
    """
    found: dict[str, Series] = {}
    header = ""  # such as "Test metrics:", or "validation": { in JSON of several lines, above indented lines
    for line in re.split(r"[\r\n]+", text):
        is_below = line[:1].isspace() and not line.lstrip().startswith("}")
        header = line if line.endswith((":", "{")) else header if is_below else ""
        for name, value in read_line(BAR.sub("", line), pattern, header, is_report):
            try:
                found.setdefault(name, Series(name)).add(value)
            except ValueError:
                fix = "let its group match digits only, such as ([-+.0-9e]+)"
                raise UserError(f"LOSS {pattern!r} finds {value!r}, which is not a number; {fix}") from None
    return found


def read_line(line: str, pattern: str, header: str, is_report: bool) -> Iterator[tuple[str, str]]:
    """Yield the names and numbers in a line: of a JSON object, else by the pattern, else by the usual names.

    `header` is a line above, which may say that the usual names are of an evaluation.
    """
    if line.lstrip().startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            metrics = json.loads(line)
            for name, number in numbers_in(metrics, is_report):
                yield full_name(name, str(metrics.get("split"))), number
            return
    if pattern:
        for match in re.finditer(pattern, line):
            for name, value in (match.groupdict() or {"loss": match[1]}).items():
                if value is not None:
                    yield full_name(name), value
        return
    for match in PAIR.finditer(line):
        yield full_name(match["name"], header + line), match["value"]


def numbers_in(metrics: dict[str, Any], is_all: bool) -> Iterator[tuple[str, str]]:
    """Yield the names and numbers in a JSON object, by default only those with the usual names."""
    for name, item in metrics.items():
        if isinstance(item, dict):
            yield from ((f"{name}_{inner}", number) for inner, number in numbers_in(item, is_all))
        elif is_all or re.search(rf"\b({METRICS}|losses)\b", re.sub("[_/]", " ", name), re.IGNORECASE):
            for number in item if isinstance(item, list) else [item]:
                if isinstance(number, int | float) and not isinstance(number, bool):
                    yield name.replace("losses", "loss"), repr(number)


def full_name(name: str, context: str = "") -> str:
    """Return a metric's name in lower case, with test_ in front if only its context marks it as an evaluation."""
    name = re.sub(r"[\s/-]+", "_", name.lower())
    is_marked = EVALUATION.search(name) or "train" in name
    return f"test_{name}" if EVALUATION.search(context) and not is_marked else name
