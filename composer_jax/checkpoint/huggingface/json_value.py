"""Values of a config.json, checked before they are used."""

from typing import Any

from composer_jax.errors import UserError


def checked_value(key: str, value: Any, like: bool | int | float, *, optional: bool = False) -> Any:
    """Returns the value if it has the type of `like` and is not a negative integer. None passes if it is optional.

    Raises:
      UserError: another type, or a negative integer; the sentence names key and value.
    """
    if value is None and optional:
        return None
    types = {bool: bool, int: int, float: int | float}[type(like)]
    if value is None or not isinstance(value, types) or (isinstance(value, bool) and not isinstance(like, bool)):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[type(like)]
        raise UserError(f"config.json has {key}={value!r}, which is not {expected}.")
    if isinstance(like, int) and value < 0:
        raise UserError(f"config.json has {key}={value!r}, which cannot be negative.")
    return value
