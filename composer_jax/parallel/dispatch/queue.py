"""The lines in which the (token, choice) pairs of a device wait for the devices of their experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Queue(NamedTuple):
    """One line for each of n devices, in the order of tokens, and a last one for nobody: expert -1."""

    line_N: jax.Array  # int32, the device that a pair waits for; n is nobody
    place_N: jax.Array  # int32, how many are before it in its line
    order_N: jax.Array  # the pairs, line after line
    starts_n: jax.Array  # int32, where a line begins in that order
    sizes_n: jax.Array  # int32


def queue_for(ids_N: jax.Array, devices: int, experts: int) -> Queue:
    """Lines up pairs for the devices of their experts, of which each has `experts`."""
    line_N = jnp.where(ids_N < 0, devices, ids_N // experts).astype(jnp.int32)
    order_N = jnp.argsort(line_N)  # stable: pairs in one line stay in the order of tokens
    sizes = jnp.bincount(line_N, length=devices + 1).astype(jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    return Queue(line_N, jnp.argsort(order_N) - starts[line_N], order_N, starts[:-1], sizes[:-1])
