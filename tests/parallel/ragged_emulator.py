"""Emulates jax.lax.ragged_all_to_all on CPUs: every device all-gathers everything and selects its rows."""

import jax
import jax.numpy as jnp


def emulate_ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Follows the collective's documentation. Rows that a receiver expects and no sender sends are NaN or -10^6."""
    gathered = (jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets))
    operands, starts, sizes, targets = gathered
    me = jax.lax.axis_index(axis_name)
    poison = jnp.nan if jnp.issubdtype(operand.dtype, jnp.floating) else -(10**6)
    column = lambda mask: mask.reshape(-1, *[1] * (output.ndim - 1))  # noqa: E731
    for s in range(operands.shape[0]):
        at = jnp.arange(output.shape[0]) - targets[s, me]
        rows = operands[s].at[starts[s, me] + at].get(mode="clip")
        rows = jnp.where(column(at < sizes[s, me]), rows, jnp.asarray(poison, operand.dtype))
        output = jnp.where(column((at >= 0) & (at < recv_sizes[s])), rows, output)
    return output
