"""Newton-Schulz iteration towards the nearest orthogonal matrix, for Muon."""

import functools

import chex
import jax
import jax.numpy as jnp

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial a x + b x^3 + c x^5 that every step applies to the singular values (Jordan et al. 2024, Muon;
Moonlight, arXiv 2502.16982, section 2.1). They do not converge to 1 but reach 0.7 to 1.2 within few steps."""
CHUNK_ELEMENTS = 2**26
"""Largest number of elements that are computed at a time, which bounds the temporaries of a large stack."""


def orthogonalize(stack_BMN: jax.Array, steps: int = 5) -> jax.Array:
    """Returns U V^T of each matrix U S V^T, approximately, [B,M,N] in the same dtype; a zero matrix stays zero."""
    chex.assert_rank(stack_BMN, 3)
    chex.assert_type(stack_BMN, jnp.floating)
    count, m, n = stack_BMN.shape
    chunk = max(1, CHUNK_ELEMENTS // (m * n))
    if count <= chunk:
        return _iterate(stack_BMN, steps)
    return jax.lax.map(lambda x_MN: _iterate(x_MN[None], steps)[0], stack_BMN, batch_size=chunk)


def _iterate(x: jax.Array, steps: int) -> jax.Array:
    a, b, c = COEFFICIENTS
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:  # the product below has the smaller side squared
        x = jnp.swapaxes(x, 1, 2)
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    # Jordan et al. run the iteration in bfloat16, so that a TPU's or GPU's rounding of float32 operands does no harm.
    default = jax.lax.Precision.DEFAULT
    multiply = functools.partial(jnp.matmul, precision=default)
    for _ in range(steps):
        gram = jnp.einsum("bmn,bkn->bmk", x, x, precision=default)
        x = a * x + multiply(b * gram + multiply(c * gram, gram), x)
    return jnp.swapaxes(x, 1, 2) if is_tall else x
