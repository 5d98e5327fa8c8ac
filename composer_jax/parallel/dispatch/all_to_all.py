"""Every chosen (token, expert) pair goes to the device of its expert and back, in buffers of a fixed size.

Each device sends each other at most `capacity` rows. XLA wants shapes it knows, so all buffers travel whole, whatever
is in them: capacity_factor (1 - 1/n) k T rows in each direction. What does not fit is dropped, and counted.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.activation import Activation, swiglu
from composer_jax.ops.permutation import slots_to_tokens, tokens_to_slots
from composer_jax.ops.vma import match_vma
from composer_jax.parallel.dispatch.compute import compute_chosen, compute_rows
from composer_jax.parallel.dispatch.contract import SPLIT, Dispatched, Experts, Split, devices_along, dispatched
from composer_jax.parallel.dispatch.queue import queue_for
from composer_jax.parallel.dispatch.share import in_parts


def all_to_all(
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    experts: Experts,
    activation: Activation = swiglu,
    *,
    capacity_factor: float = 2.0,
    split: Split = SPLIT,
) -> Dispatched:
    """Exchanges rows in buffers that hold capacity_factor times what goes to a device when loads are equal.

    A pair that does not fit adds nothing to y, and its gate gets no gradient. Of what one device sends to another the
    later tokens are dropped. Among devices with the same tokens, each sends its own part of them.
    """
    if not split.group:
        return dispatched(compute_chosen(x_TD, ids_Tk, gates_Tk, experts, activation), x_TD)
    compute = partial(
        _exchange, experts=experts, activation=activation, axes=split.group, capacity_factor=capacity_factor
    )
    y_TD, dropped = in_parts(compute, x_TD, ids_Tk, gates_Tk, split.alike)
    return dispatched(y_TD, x_TD, dropped)


def capacity_of(tokens: int, choices: int, devices: int, experts: int, factor: float) -> int:
    """Rows that one device can send another: `factor` times the mean, in eights, and never more than there can be.

    Args:
      tokens: of the sending device.
      choices: experts of each token.
      devices: in the group, the sender included.
      experts: of each device.
    """
    rows = math.ceil(factor * tokens * choices / devices)
    return min(-(-rows // 8) * 8, tokens * min(choices, experts))


class Slots(NamedTuple):
    """Where pairs are in the send buffer: M slots, `capacity` of them for each device of the group."""

    pairs_M: jax.Array  # the pair in a slot, counted t k + j; N where it is empty
    places_Tk: jax.Array  # the slot of a pair; M where it has none
    dropped: jax.Array  # float32 []: how many have none, though an expert


def slots_of(ids_Tk: jax.Array, devices: int, experts: int, capacity: int) -> Slots:
    """Gives every pair a slot with its expert's device, in the order of tokens, as long as there are any."""
    queue = queue_for(ids_Tk.reshape(-1), devices, experts)
    pairs, slots = queue.line_N.size, devices * capacity
    fits_N = (queue.line_N < devices) & (queue.place_N < capacity)
    places_N = jnp.where(fits_N, queue.line_N * capacity + queue.place_N, slots)
    slot = jnp.arange(capacity)
    pairs_nC = queue.order_N.at[queue.starts_n[:, None] + slot].get(mode="clip")
    pairs_nC = jnp.where(slot < queue.sizes_n[:, None], pairs_nC, pairs)
    dropped = jnp.maximum(queue.sizes_n - capacity, 0).sum().astype(jnp.float32)
    return Slots(pairs_nC.reshape(-1), places_N.reshape(ids_Tk.shape), dropped)


def _exchange(
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    *,
    experts: Experts,
    activation: Activation,
    axes: tuple[str, ...],
    capacity_factor: float,
) -> tuple[jax.Array, jax.Array]:
    x_TD, ids_Tk, gates_Tk, *_ = match_vma(x_TD, ids_Tk, gates_Tk, *jax.tree.leaves(experts))
    n, e = devices_along(axes), experts.gate_EDF.shape[0]
    slots = slots_of(ids_Tk, n, e, capacity_of(*ids_Tk.shape, n, e, capacity_factor))
    exchange = partial(jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
    # An empty slot asks for expert E', whom no device has.
    ids_M = (ids_Tk.reshape(-1) % e).at[slots.pairs_M].get(mode="fill", fill_value=e)
    x_MD = exchange(tokens_to_slots(x_TD, slots.pairs_M, slots.places_Tk))
    y_MD = exchange(compute_rows(x_MD, exchange(ids_M), experts, activation))
    # Gates stay at home: they need not travel, nor do their gradients.
    gates_M1 = tokens_to_slots(gates_Tk.reshape(-1, 1), slots.pairs_M, slots.places_Tk.reshape(-1, 1))
    return slots_to_tokens(y_MD * gates_M1, slots.pairs_M, slots.places_Tk), slots.dropped
