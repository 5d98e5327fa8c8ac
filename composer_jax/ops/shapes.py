"""Checks of shapes and dtypes at trace time: an array's name carries its axes, as in the shape legend.

The legend (composer_jax/models/__init__.py) gives each axis one letter. The checks read shapes and dtypes only, so they
add no operation to a traced program.
"""

import copy
from typing import Any

import chex
from jax.typing import DTypeLike


def check_shapes(sizes: chex.Dimensions | None = None, /, **arrays: tuple[Any, DTypeLike | None]) -> chex.Dimensions:
    """Asserts the shape and dtype of each array, and returns the size of each letter.

        dims = check_shapes(x_TD=(x_TD, jnp.floating), ids_Tk=(ids_Tk, jnp.int32))
        check_shapes(dims, y_TD=(y_TD, x_TD.dtype))

    The letters after the last underscore of a name are the axes of its array, in order. A letter takes its size from
    the first array that has it, and every later axis of that letter must agree. A name without such letters is that of
    a scalar. An optional array may be None and is then left out.

    Args:
      sizes: sizes that are known beforehand, for example `chex.Dimensions(D=config.d_model)`; not modified.
      arrays: name=(array, dtype). The dtype is a dtype (`jnp.float32`, `bool`) or a kind (`jnp.floating`,
        `jnp.integer`); None accepts any. Inside shard_map the shapes are those of one device's shard.

    Raises:
      AssertionError: a shape or dtype is wrong; the message names the array, its letters and the sizes.
    """
    dims = chex.Dimensions() if sizes is None else copy.copy(sizes)
    for name, (array, dtype) in arrays.items():
        if array is None:
            continue
        letters = _letters(name)
        if len(letters) == array.ndim:
            for letter, size in zip(letters, array.shape, strict=True):
                if not hasattr(dims, letter):
                    dims[letter] = (size,)
        known = ", ".join(f"{letter}={getattr(dims, letter, 'any')}" for letter in dict.fromkeys(letters))
        what = f"{name} is {array.dtype}{list(array.shape)}, not [{','.join(letters)}] with {known or 'no axes'}"
        expected = tuple(getattr(dims, letter, None) for letter in letters)
        chex.assert_shape(array, expected, custom_message=what, include_default_message=False)
        if dtype is None:
            continue
        what = f"{name} is {array.dtype}{list(array.shape)}, not of dtype {getattr(dtype, '__name__', dtype)}"
        chex.assert_type(array, dtype, custom_message=what, include_default_message=False)
    return dims


def _letters(name: str) -> str:
    """The axes that a name carries: "TD" of "x_TD", none of "windowed" or "token_mask"."""
    suffix = name.rpartition("_")[2] if "_" in name else ""
    return suffix if suffix[:1].isupper() else ""
