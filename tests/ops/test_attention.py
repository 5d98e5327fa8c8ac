"""Scores of few and of many queries against NumPy, and which operand a CPU has to transpose."""

import re

import jax
import numpy as np
import pytest

from composer_jax.ops.attention import masked_scores
from tests.models.small import relative_error

B, N, T, X = 2, 3, 24, 16
FEW, MANY = X - 1, X


def operands(queries):
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal(shape).astype(np.float32) for shape in ((B, N, queries, X), (B, T, N, X), (B, queries, T))
    ]


@pytest.mark.parametrize("queries", [FEW, MANY])
def test_scores_are_products_plus_the_bias(queries):
    q, k, bias = operands(queries)
    expected = np.einsum("bnqx,btnx->bnqt", *(a.astype(np.float64) for a in (q, k))) + bias[:, None]
    assert relative_error(masked_scores(q, k, bias, None), expected) < 1e-6


def test_the_keys_are_the_first_operand_for_few_queries():
    program = jax.jit(lambda *arrays: masked_scores(*arrays, None)).lower(*operands(FEW)).as_text()
    (first_operand,) = re.findall(r"stablehlo.dot_general.*: \(tensor<(\w+)>,", program)
    assert first_operand == f"{B}x{N}x{T}x{X}xf32"
