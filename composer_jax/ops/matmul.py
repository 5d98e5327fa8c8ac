"""Product of activations with a weight, whose gradients copy little on a CPU.

XLA's CPU products want the contracted axis last in their first operand and first in the second. The gradient of a
weight contracts tokens, which is the first axis of both x and dy, so its first operand is transposed in memory, element
by element, together with whatever computes it. Automatic differentiation makes that dy, however wide it is. Compilers
for TPUs and GPUs choose the layout of operands themselves.
"""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp

from composer_jax.ops.vma import match_vma


def float32_sum_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Returns the precision of a product of operands in the compute dtype that has a float32 result.

    Products of bfloat16 operands are exact at every precision. In a backward pass that JAX derives, the result's
    float32 gradient is an operand, which DEFAULT rounds to bfloat16 (TPU) or TF32 (GPU), no more than the gradients
    that it becomes. None for float32 operands: ModelConfig.compute_dtype says what that means.
    """
    return jax.lax.Precision.DEFAULT if dtype == jnp.bfloat16 else None


def matmul(x: jax.Array, w: jax.Array, contracted: int = 1) -> jax.Array:
    """Returns the sum over the last `contracted` dimensions of x and the first ones of w, in the dtype of both.

    On a CPU the gradient of w transposes the narrower one of x and dy. Where products with several weights share a
    narrow x, their gradients share its transpose.

    Args:
      x: [..., *in], floating. w: [*in, *out], of the same dtype. The result is [..., *out].
    """
    chex.assert_type([x, w], jnp.floating)
    chex.assert_equal(x.dtype, w.dtype)
    return _matmul(contracted, *match_vma(x, w))


def matmul_to_float32(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x @ w in float32, for values that need more digits than the compute dtype has, such as logits.

    With bfloat16 operands the gradient of the result is rounded to bfloat16 before its two products, as a TPU does by
    itself; sums are float32. A GPU would multiply in TF32 instead, at half of the rate, and read twice the bytes. In
    float16 gradients of logits would underflow.

    Args:
      x: [..., D], floating. w: [D, F], of the same dtype. The result is [..., F].
    """
    chex.assert_type([x, w], jnp.floating)
    chex.assert_equal(x.dtype, w.dtype)
    chex.assert_axis_dimension(x, -1, w.shape[0])
    if x.dtype != jnp.bfloat16:
        return _float32_sums("...d,df->...f", x, w)
    return _matmul_to_float32(*match_vma(x, w))


@jax.custom_vjp
def _matmul_to_float32(x: jax.Array, w: jax.Array) -> jax.Array:
    return _float32_sums("...d,df->...f", x, w)


def _float32_sums(product: str, x: jax.Array, y: jax.Array) -> jax.Array:
    how: Any = dict(precision=float32_sum_precision(x.dtype), preferred_element_type=jnp.float32)
    return jnp.einsum(product, x, y, **how)


def _rounded_backward(saved, dy):
    x, w = saved
    dy = dy.astype(x.dtype)
    dx, dw = _float32_sums("...f,df->...d", dy, w), _float32_sums("...d,...f->df", x, dy)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_matmul_to_float32.defvjp(lambda x, w: (_matmul_to_float32(x, w), (x, w)), _rounded_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(contracted: int, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tensordot(x, w, contracted)


def _backward(contracted, saved, dy):
    x, w = saved
    d, f = math.prod(w.shape[:contracted]), math.prod(w.shape[contracted:])

    def automatic(x, w, dy):
        return jax.vjp(functools.partial(jnp.tensordot, axes=contracted), x, w)[1](dy)

    def transpose_x(x, w, dy):
        dw_DF = jax.lax.dot_general(x.reshape(-1, d), dy.reshape(-1, f), (((0,), (0,)), ((), ())))
        return automatic(x, w, dy)[0], dw_DF.reshape(w.shape)

    if d > f:
        return automatic(x, w, dy)
    return jax.lax.platform_dependent(x, w, dy, cpu=transpose_x, default=automatic)


_matmul.defvjp(lambda contracted, *operands: (_matmul(contracted, *operands), operands), _backward)
