"""A page that shows training rows as they are trained: the text of every row, and which of it the loss counts."""

import importlib.resources
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from composer_jax.atomic_write import write_atomically
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.data.token_source import Trace

PAGE = "sft_rows.html"


class Piece(NamedTuple):
    """Neighbouring tokens of a kind."""

    text: str
    trained: bool
    control: bool


class ShownRow(NamedTuple):
    """One training row."""

    tokens: int
    trained: int
    pieces: list[Piece]


def write_rows_page(workdir: Path, traces: Sequence[Trace], tokenizer: TextTokenizer, total: int) -> Path:
    """Writes PAGE into a folder; returns its path.

    Args:
      traces: (tokens int32[n], trained bool[n]) of the rows to show.
      total: how many rows there are.
    """
    template = importlib.resources.files("composer_jax.stages")
    style = importlib.resources.files("composer_jax.observe") / "report.css"
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    rows = [ShownRow(len(row[0]), int(np.sum(row[1])), pieces(row, tokenizer)) for row in traces]
    page = environment.from_string((template / "rows_page.html").read_text("utf-8")).render(
        rows=rows,
        total=total,
        style=Markup(style.read_text("utf-8")),
    )
    return write_atomically(Path(workdir) / PAGE, page.encode("utf-8", errors="replace"))


def pieces(row: Trace, tokenizer: TextTokenizer) -> list[Piece]:
    """Returns the text of a row in pieces, each trained or not, of control tokens or not."""
    tokens, trained = row
    kinds = [(bool(t), tokenizer.is_control(int(i))) for i, t in zip(tokens, trained, strict=True)]
    found = []
    for (is_trained, is_control), run in groupby(range(len(kinds)), key=kinds.__getitem__):
        text = tokenizer.decode([int(tokens[at]) for at in run])
        found.append(Piece(text, is_trained, is_control))
    return found
