"""The dtypes that weights are read and written in."""

from composer_jax.errors import UserError

FLOATS = ("float32", "bfloat16", "float16")


def require_float_dtype(dtype: str | None) -> str | None:
    """The name as it is. Raises a UserError for one that is not of a float of two or four bytes."""
    if dtype is not None and dtype not in FLOATS:
        raise UserError(f"dtype={dtype!r} is not one of weights; use {', '.join(FLOATS)}.")
    return dtype
