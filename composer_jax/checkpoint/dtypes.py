"""The dtypes of stored weights."""

from composer_jax.errors import UserError

FLOATS = ("float32", "bfloat16", "float16")


def require_float_dtype(dtype: str | None) -> str | None:
    """Returns the name unchanged. Raises a UserError unless it is None or in FLOATS."""
    if dtype is not None and dtype not in FLOATS:
        raise UserError(f"dtype={dtype!r} is not a dtype of weights; use {', '.join(FLOATS)}.")
    return dtype
