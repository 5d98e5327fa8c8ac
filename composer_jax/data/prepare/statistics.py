"""What was read, left out and written: counts that add up over units, and a page of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tables = dict[str, dict[str, list[int]]]
"""table -> row -> [count, amount]."""


class Tally:
    """Counts with an amount each (bytes or tokens), in named tables with named rows."""

    def __init__(self, tables: Tables | None = None) -> None:
        self.tables: Tables = tables or {}

    def add(self, table: str, row: str, amount: int, count: int = 1) -> None:
        """Adds to a row, which is made if need be."""
        cell = self.tables.setdefault(table, {}).setdefault(row, [0, 0])
        cell[0] += count
        cell[1] += amount

    def merge(self, other: Tally) -> None:
        """Adds every row of another tally."""
        for table, rows in other.tables.items():
            for row, (count, amount) in rows.items():
                self.add(table, row, amount, count)

    def total(self, table: str) -> tuple[int, int]:
        """Returns (count, amount) over all rows of a table."""
        cells = self.tables.get(table, {}).values()
        return sum(cell[0] for cell in cells), sum(cell[1] for cell in cells)


# Table, title, what its rows are, what is counted, what the amount is.
_SECTIONS = (
    ("candidates", "Sources", "source", "files, rows and commits", "bytes"),
    ("left out", "Left out", "reason", "files, rows and commits", "bytes"),
    ("languages", "Written, by language", "language", "files, rows and commits", "bytes"),
    ("train", "Training documents", "source", "documents", "tokens"),
    ("heldout", "Held-out documents", "source", "documents", "tokens"),
    ("fill in the middle", "Training documents that fill in the middle", "source", "documents", "tokens"),
)


def statistics_page(tally: Tally, config: Mapping[str, Any], tokenizer: str) -> str:
    """Returns a page in Markdown, largest amounts first."""
    lines = ["# Prepared data", "", f"Tokenizer: {tokenizer}", ""]
    for table, title, row_name, count_name, amount_name in _SECTIONS:
        rows = tally.tables.get(table, {})
        if not rows:
            continue
        lines += [f"## {title}", "", f"| {row_name} | {count_name} | {amount_name} |", "|---|---:|---:|"]
        for row, (count, amount) in sorted(rows.items(), key=lambda item: (-item[1][1], item[0])):
            lines.append(f"| {_cell(row)} | {count:,} | {amount:,} |")
        count, amount = tally.total(table)
        lines += [f"| all | {count:,} | {amount:,} |", ""]
    lines += ["## Settings", "", "| field | value |", "|---|---|"]
    lines += [f"| {name} | {_cell(str(value))} |" for name, value in config.items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").encode("utf-8", errors="replace").decode()
