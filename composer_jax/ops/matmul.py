"""Product of activations with a weight, whose gradients copy little on a CPU.

XLA's CPU products want the contracted axis last in their first operand and first in the second. The gradient of a
weight contracts tokens, which is the first axis of both x and dy, so its first operand is transposed in memory, element
by element, together with whatever computes it. Automatic differentiation makes that dy, however wide it is. Compilers
for TPUs and GPUs choose the layout of operands themselves.
"""

import functools
import math

import chex
import jax
import jax.numpy as jnp

from composer_jax.ops.vma import match_vma


def float32_sum_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Returns the precision of a product of operands in the compute dtype that has a float32 result.

    Products of bfloat16 operands are exact at every precision. In the backward pass the result's float32 gradient is an
    operand, which DEFAULT rounds to bfloat16 (TPU) or TF32 (GPU), no more than the gradients that it becomes. None for
    float32 operands: ModelConfig.compute_dtype says what that means.
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
