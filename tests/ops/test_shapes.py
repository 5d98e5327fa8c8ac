"""The check of shapes and dtypes at trace time."""

import ast
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest

import composer_jax
from composer_jax import models
from composer_jax.ops.shapes import check_shapes

X_TD, IDS_Tk = jnp.zeros((8, 4)), jnp.zeros((8, 2), jnp.int32)


def test_letters_take_their_sizes_from_the_first_array_and_are_returned():
    dims = check_shapes(x_TD=(X_TD, jnp.floating), ids_Tk=(IDS_Tk, jnp.integer))
    assert (dims.T, dims.D, dims.k) == (8, 4, 2)


def test_known_sizes_stay_as_they_are_and_optional_arrays_have_none():
    sizes = chex.Dimensions(D=5)
    check_shapes(sizes, bias_D=(jnp.zeros(5), jnp.floating), x_T=(jnp.zeros(3), jnp.floating))
    assert repr(sizes) == "Dimensions(D=5)"
    dims = check_shapes(sinks_H=(None, jnp.floating), windowed=(jnp.bool_(True), bool))
    assert repr(dims) == "Dimensions()"
    check_shapes(ids_Tk=(IDS_Tk, None), x_TD=(X_TD, None), a_DD=(jnp.zeros((4, 4)), jnp.floating))


FLOAT = jnp.floating
WRONG = [
    ({"x_TD": (X_TD, FLOAT), "y_TD": (X_TD.T, FLOAT)}, r"y_TD is float32\[4, 8\], not \[T,D\] with T=8, D=4"),
    ({"known": chex.Dimensions(D=5), "x_TD": (X_TD, FLOAT)}, r"x_TD is float32\[8, 4\], not \[T,D\] with T=8, D=5"),
    ({"x_BSD": (X_TD, FLOAT)}, r"x_BSD is float32\[8, 4\], not \[B,S,D\] with B=any, S=any, D=any"),
    ({"token_mask": (jnp.zeros(8, bool), bool)}, r"token_mask is bool\[8\], not \[\] with no axes"),
    ({"a_DD": (X_TD, FLOAT)}, r"a_DD is float32\[8, 4\], not \[D,D\] with D=8"),
    ({"x_TD": (X_TD, None), "y_T": (X_TD[0], None)}, r"y_T is float32\[4\], not \[T\] with T=8"),
    ({"x_TD": (X_TD, jnp.bfloat16)}, r"x_TD is float32\[8, 4\], not of dtype bfloat16"),
    ({"x_TD": (X_TD, jnp.integer)}, "not of dtype integer"),
    ({"x_TD": (X_TD, bool)}, "not of dtype bool"),
    ({"x_TD": (X_TD.astype(jnp.int8), jnp.int32)}, "not of dtype int32"),
]


@pytest.mark.parametrize(("arrays", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_named_with_its_letters_and_sizes(arrays, message):
    known = [sizes for sizes in [arrays.get("known")] if sizes is not None]
    with pytest.raises(AssertionError, match=message):
        check_shapes(*known, **{name: array for name, array in arrays.items() if name != "known"})


def test_tracing_raises_and_a_right_program_stays_as_it_was():
    def checked(x_TD, ids_Tk):
        check_shapes(x_TD=(x_TD, jnp.float32), ids_Tk=(ids_Tk, jnp.int32))
        return x_TD * 2

    plain = jax.make_jaxpr(lambda x_TD, ids_Tk: x_TD * 2)(X_TD, IDS_Tk)
    assert str(jax.make_jaxpr(checked)(X_TD, IDS_Tk)) == str(plain)
    with pytest.raises(AssertionError, match=r"ids_Tk is int32\[2, 8\]"):
        jax.jit(checked)(X_TD, IDS_Tk.T)


def test_every_checked_letter_is_in_the_shape_legend():
    legend = set(re.findall(r"(?:^|  )([A-Za-z])  \w", models.__doc__, flags=re.MULTILINE))
    unknown = []
    for file in sorted(Path(composer_jax.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("check_shapes"):
                suffixes = [keyword.arg.rpartition("_")[2] for keyword in node.keywords if "_" in (keyword.arg or "")]
                letters = {letter for suffix in suffixes if suffix[0].isupper() for letter in suffix}
                unknown += [f"{file.name}:{node.lineno}: {letter}" for letter in sorted(letters - legend)]
    assert legend >= set("BSTDHNVXk")
    assert unknown == []
