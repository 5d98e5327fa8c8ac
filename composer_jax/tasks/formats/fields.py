"""Typed access to the fields of untrusted rows and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from composer_jax.errors import UserError


class Fields:
    """A mapping whose values are read by type. A missing field and None are equal and give the default.

    where: its name in errors, such as "rows.jsonl, line 3". Every method raises UserError for a value of another type
    and for a missing value without a default.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        return self._get(name, str, "a text", default)

    def flag(self, name: str, default: bool) -> bool:
        return self._get(name, bool, "true or false", default)

    def number(self, name: str, default: float) -> float:
        """Returns a number from 0 to 1e15."""
        value = self._get(name, (int, float), "a number", default)
        if isinstance(value, bool) or not 0 <= value <= 1e15:
            raise UserError(f"{self.where} has {name} = {short_repr(value)}; it must be a number from 0 to 1e15")
        return float(value)

    def texts(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Returns a list of texts, or parses one from a JSON text."""
        value = self._get(name, (list, tuple, str), "a list of texts", default)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{self.where} has a {name} that is not a list of texts: {short_repr(self.values[name])}")
        return tuple(value)

    def table(self, name: str) -> Fields:
        return Fields(self._get(name, Mapping, "a table", {}), f"{self.where} [{name}]")

    def tables(self, name: str) -> tuple[Mapping[str, Any], ...]:
        value = self._get(name, list, "a list of tables", [])
        if not all(isinstance(item, Mapping) for item in value):
            raise UserError(f"{self.where} has a {name} that is not a list of tables: {short_repr(value)}")
        return tuple(value)

    def _get(self, name: str, kind: type | tuple[type, ...], words: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise UserError(f"{self.where} has no {name}; it must be {words}")
            return default
        if not isinstance(value, kind):
            raise UserError(f"{self.where} has {name} = {short_repr(value)}; it must be {words}")
        return value


def short_repr(value: Any) -> str:
    """Returns the value as Python writes it, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = "a very long number"
    return text if len(text) <= 80 else f"{text[:77]}..."
