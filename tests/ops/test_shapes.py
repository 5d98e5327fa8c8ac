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


def test_a_letter_of_another_size_names_the_array_the_letters_and_the_sizes():
    with pytest.raises(AssertionError, match=r"y_TD is float32\[4, 8\], not \[T,D\] with T=8, D=4"):
        check_shapes(x_TD=(X_TD, jnp.floating), y_TD=(X_TD.T, jnp.floating))


def test_known_sizes_hold_from_the_start_and_stay_as_they_are():
    sizes = chex.Dimensions(D=5)
    with pytest.raises(AssertionError, match=r"x_TD is float32\[8, 4\], not \[T,D\] with T=8, D=5"):
        check_shapes(sizes, x_TD=(X_TD, jnp.floating))
    check_shapes(sizes, bias_D=(jnp.zeros(5), jnp.floating), x_T=(jnp.zeros(3), jnp.floating))
    assert repr(sizes) == "Dimensions(D=5)"


@pytest.mark.parametrize(
    ("array", "dtype"),
    [(X_TD, jnp.bfloat16), (X_TD, jnp.integer), (X_TD, bool), (X_TD.astype(jnp.int8), jnp.int32)],
)
def test_a_dtype_of_another_kind_is_named(array, dtype):
    with pytest.raises(AssertionError, match=rf"x_TD is {array.dtype}\[8, 4\], not of dtype {dtype.__name__}"):
        check_shapes(x_TD=(array, dtype))


def test_the_number_of_axes_is_checked():
    with pytest.raises(AssertionError, match=r"x_BSD is float32\[8, 4\], not \[B,S,D\] with B=any, S=any, D=any"):
        check_shapes(x_BSD=(X_TD, jnp.floating))
    with pytest.raises(AssertionError, match=r"token_mask is bool\[8\], not \[\] with no axes"):
        check_shapes(token_mask=(jnp.zeros(8, bool), bool))


def test_an_array_with_one_letter_twice_is_square():
    check_shapes(a_DD=(jnp.zeros((4, 4)), jnp.floating))
    with pytest.raises(AssertionError, match=r"a_DD is float32\[8, 4\], not \[D,D\] with D=8"):
        check_shapes(a_DD=(X_TD, jnp.floating))


def test_optional_arrays_and_scalars():
    dims = check_shapes(sinks_H=(None, jnp.floating), windowed=(jnp.bool_(True), bool))
    assert repr(dims) == "Dimensions()"


def test_without_a_dtype_only_the_shape_is_checked():
    check_shapes(ids_Tk=(IDS_Tk, None), x_TD=(X_TD, None))
    with pytest.raises(AssertionError, match=r"y_T is float32\[4\], not \[T\] with T=8"):
        check_shapes(x_TD=(X_TD, None), y_T=(X_TD[0], None))


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
