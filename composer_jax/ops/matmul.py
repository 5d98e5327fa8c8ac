"""Product of activations with a weight, whose gradients copy little on a CPU.

XLA's CPU products want the contracted axis last in their first operand and first in the second. The gradient of a
weight contracts tokens, which is the first axis of both x and dy, so its first operand is transposed in memory, element
by element, together with whatever computes it. Automatic differentiation makes that dy, however wide it is. Compilers
for TPUs and GPUs choose the layout of operands themselves.
"""

import jax
import jax.numpy as jnp

from composer_jax.ops.shapes import check_shapes
from composer_jax.ops.vma import match_vma

_TOKENS = (((0,), (0,)), ((), ()))


def matmul(x_TD: jax.Array, w_DF: jax.Array) -> jax.Array:
    """Returns x w, [T,F], in the dtype of both.

    On a CPU the gradient of w transposes the narrower one of x and dy. Where products with several weights share a
    narrow x, their gradients share its transpose.
    """
    check_shapes(x_TD=(x_TD, jnp.floating), w_DF=(w_DF, x_TD.dtype))
    return _matmul(*match_vma(x_TD, w_DF))


@jax.custom_vjp
def _matmul(x_TD: jax.Array, w_DF: jax.Array) -> jax.Array:
    return x_TD @ w_DF


def _forward(x_TD, w_DF):
    return _matmul(x_TD, w_DF), (x_TD, w_DF)


def _backward(saved, dy_TF):
    x_TD, w_DF = saved
    dx_TD = jax.lax.dot_general(dy_TF, w_DF, (((1,), (1,)), ((), ())))
    if w_DF.shape[0] > w_DF.shape[1]:
        return dx_TD, _transpose_dy(x_TD, dy_TF)
    return dx_TD, jax.lax.platform_dependent(x_TD, dy_TF, cpu=_transpose_x, default=_transpose_dy)


def _transpose_x(x_TD: jax.Array, dy_TF: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x_TD, dy_TF, _TOKENS)


def _transpose_dy(x_TD: jax.Array, dy_TF: jax.Array) -> jax.Array:
    """What automatic differentiation does."""
    return jax.lax.dot_general(dy_TF, x_TD, _TOKENS).T


_matmul.defvjp(_forward, _backward)
