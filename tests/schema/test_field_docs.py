"""The meaning of a config field comes from the string literal below it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from composer_jax.models.config import ModelConfig
from composer_jax.schema.field_docs import field_default, field_meaning, field_texts, first_sentence
from composer_jax.schema.run_config import RunConfig
from configs import kimi_k2_5, tiny
from launch.config_file import fields


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
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments."""


@dataclasses.dataclass(frozen=True)
class Child(Outer):
    extra: float = 0.5
    """Half of what Dr. Who has. Not published."""


@pytest.mark.parametrize(
    ("path", "meaning"),
    [
        ("inner", "A section."),
        ("inner.width", "Columns, e.g. Those of a table."),
        ("inner.height", ""),
        ("maybe.width", "Columns, e.g. Those of a table."),
        ("suites.bugs.width", "Columns, e.g. Those of a table."),
        ("counts.bugs", "How many of each kind (ours; not published)."),
        ("extra", "Half of what Dr. Who has."),
        ("options.traces.bugs", "Arguments."),
        ("nothing", ""),
        ("nothing.there", ""),
        ("extra.there", ""),
    ],
)
def test_meaning_of_a_path(path, meaning):
    assert field_meaning(Child, path) == meaning


@pytest.mark.parametrize(
    ("path", "default"),
    [
        ("inner.width", 3),
        ("maybe", None),
        ("suites.bugs.height", 4),
        ("counts", {}),
        ("counts.bugs", dataclasses.MISSING),
        ("nothing", dataclasses.MISSING),
    ],
)
def test_default_of_a_path(path, default):
    assert field_default(Child, path) == default


def test_texts_of_a_library_dataclass():
    texts = field_texts(ModelConfig)
    assert texts["max_context"].startswith("Longest context in tokens")
    assert set(texts) <= {field.name for field in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize("get_config", [kimi_k2_5.get_config, tiny.get_config], ids=["kimi_k2_5", "tiny"])
def test_every_field_of_a_config_has_a_meaning(get_config):
    assert [path for path, _ in fields(get_config()) if not field_meaning(RunConfig, path)] == []


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
