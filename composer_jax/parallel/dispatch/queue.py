"""Queues the (token, choice) pairs of a device by the device of their expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DeviceQueues(NamedTuple):
    """One queue for each of n devices, in the order of tokens, and a last one for pairs without an expert (id -1)."""

    device_N: jax.Array  # int32, the device of a pair's expert; n if it has none
    rank_N: jax.Array  # int32, the number of pairs before it in its queue
    order_N: jax.Array  # the pairs, queue after queue
    starts_n: jax.Array  # int32, the index in that order at which each queue starts
    sizes_n: jax.Array  # int32, pairs in each queue


def queue_by_device(ids_N: jax.Array, devices: int, experts: int) -> DeviceQueues:
    """Queues the pairs with expert ids `ids_N` for `devices` devices of `experts` experts each."""
    device_N = jnp.where(ids_N < 0, devices, ids_N // experts).astype(jnp.int32)
    order_N = jnp.argsort(device_N)  # stable: pairs of one queue stay in the order of tokens
    sizes = jnp.bincount(device_N, length=devices + 1).astype(jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    return DeviceQueues(device_N, jnp.argsort(order_N) - starts[device_N], order_N, starts[:-1], sizes[:-1])
