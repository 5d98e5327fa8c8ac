"""The meaning of a config field comes from the string literal below it."""

import dataclasses
from collections.abc import Mapping

import pytest

from composer_jax.models.config import ModelConfig
from composer_jax.stages.field_docs import field_meaning, field_texts, first_sentence


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = 3
    """Columns, e.g. Those of a table. More is slower."""
    height: int = 4


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    """A section."""
    maybe: Inner | None = None
    suites: Mapping[str, Inner] = dataclasses.field(default_factory=dict)
    """Named sections."""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many of each
    kind (ours; not published)."""


@dataclasses.dataclass(frozen=True)
class Child(Outer):
    extra: float = 0.5
    """Half."""


@pytest.mark.parametrize(
    ("path", "meaning"),
    [
        ("inner", "A section."),
        ("inner.width", "Columns, e.g. Those of a table."),
        ("inner.height", ""),
        ("maybe.width", "Columns, e.g. Those of a table."),
        ("suites.bugs.width", "Columns, e.g. Those of a table."),
        ("counts.recall", "How many of each kind (ours; not published)."),
        ("extra", "Half."),
        ("nothing", ""),
        ("nothing.there", ""),
        ("extra.there", ""),
    ],
)
def test_meaning_of_a_path(path, meaning):
    assert field_meaning(Child, path) == meaning


def test_texts_of_a_library_dataclass():
    texts = field_texts(ModelConfig)
    assert texts["max_context"].startswith("Longest context in tokens")
    assert set(texts) <= {field.name for field in dataclasses.fields(ModelConfig)}


def test_a_class_without_source_has_no_texts():
    assert field_texts(dataclasses.make_dataclass("Made", [("width", int)])) == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Rank (K2: 1536). None: direct.", "Rank (K2: 1536)."),
        ("Section 4.2 of the paper", "Section 4.2 of the paper"),
        ("", ""),
    ],
)
def test_first_sentence(text, sentence):
    assert first_sentence(text) == sentence
