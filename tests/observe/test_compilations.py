"""Compilations are counted and named."""

import jax
import numpy as np
import pytest

from composer_jax.observe.compilations import compiled_since, count_compilations
from tests.compilations import compiles_nothing


def negate(x):
    return -x


def test_what_was_compiled_has_its_name():
    before = count_compilations()
    negative = jax.jit(negate)
    negative(np.zeros(3))
    assert count_compilations() == before + 1
    negative(np.ones(3))
    [program] = compiled_since(before)
    assert "negate" in program


def test_a_block_that_compiles_is_told_what():
    with pytest.raises(AssertionError, match="negate"), compiles_nothing():
        jax.jit(negate)(np.zeros((2, 3)))
