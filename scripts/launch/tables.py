"""Tables of figures, as commands print and write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, the key of its figures in the rows, and how they are written."""

    title: str
    key: str
    form: str | Callable[[float], str] = "{}"
    factor: float = 1

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return a row's figure as text, or a dash for None."""
        value = row[self.key]
        if value is None:
            return "-"
        write = self.form.format if isinstance(self.form, str) else self.form
        return write(value * self.factor if isinstance(value, int | float) else value)


def short_number(value: float) -> str:
    """Return a number with one decimal, or with two significant digits if it is below 1."""
    if value < 1e-9:  # what rounding leaves of 0, of either sign
        return "0.0"
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """Return a time in hours, minutes or seconds."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{short_number(seconds)} s"


def table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], left: int = 0) -> str:
    """Return rows of figures as a Markdown table whose first `left` columns are aligned to the left."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return markdown_table([[column.title for column in columns], *cells], left)


def markdown_table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows, the first one the header, as a Markdown table whose first `left` columns align to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = [("-" * width if i < left else "-" * (width - 1) + ":") for i, width in enumerate(widths)]
    form = "| " + " | ".join(f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths)) + " |"
    return "\n".join(form.format(*cells) for cells in (rows[0], rule, *rows[1:]))
