"""all_to_all dispatch: sends every chosen (token, expert) pair to the device of its expert, in buffers of fixed size.

Each device sends every other at most `capacity` rows. XLA needs static shapes, so whole buffers are sent whatever they
hold: capacity_factor (1 - 1/n) k T rows in each direction. Pairs that do not fit are dropped and counted.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.ops.activation import Activation, swiglu
from composer_jax.ops.permutation import slots_to_tokens, tokens_to_slots
from composer_jax.ops.vma import match_vma
from composer_jax.parallel.dispatch.compute import compute_chosen_experts, compute_rows
from composer_jax.parallel.dispatch.contract import (
    DISPATCH_AXES,
    DispatchAxes,
    DispatchOutput,
    Experts,
    check_operands,
    dispatch_output,
    group_size,
)
from composer_jax.parallel.dispatch.queue import queue_by_device
from composer_jax.parallel.dispatch.replicated_tokens import split_replicated_tokens


def all_to_all(
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    experts: Experts,
    activation: Activation = swiglu,
    *,
    capacity_factor: float = 2.0,
    axes: DispatchAxes = DISPATCH_AXES,
) -> DispatchOutput:
    """Exchanges rows in buffers that hold capacity_factor times what a device receives under balanced load.

    A pair that does not fit adds nothing to y, and its gate gets no gradient. Of the pairs that one device sends to
    another, those of later tokens are dropped. Devices with replicated tokens each send their own part of them.
    """
    check_operands(x_TD, ids_Tk, gates_Tk, experts)
    if not axes.group:
        return dispatch_output(compute_chosen_experts(x_TD, ids_Tk, gates_Tk, experts, activation), x_TD)
    compute = partial(
        _exchange, experts=experts, activation=activation, axes=axes.group, capacity_factor=capacity_factor
    )
    y_TD, dropped = split_replicated_tokens(compute, x_TD, ids_Tk, gates_Tk, axes.replicated_axes)
    return dispatch_output(y_TD, x_TD, dropped)


def send_capacity(tokens: int, choices: int, devices: int, experts: int, factor: float) -> int:
    """Returns the rows that one device can send another: `factor` times the mean, a multiple of 8, at most all pairs.

    Args:
      tokens: of the sending device.
      choices: experts per token.
      devices: in the group, the sender included.
      experts: per device.
      factor: the capacity factor.
    """
    rows = math.ceil(factor * tokens * choices / devices)
    return min(-(-rows // 8) * 8, tokens * min(choices, experts))


class SendSlots(NamedTuple):
    """The slots of the send buffer: M of them, `capacity` for each device of the group."""

    pairs_M: jax.Array  # the pair t k + j in a slot; N if the slot is empty
    slots_Tk: jax.Array  # the slot of a pair; M if it has none
    dropped: jax.Array  # float32 []: pairs that have an expert and no slot


def assign_slots(ids_Tk: jax.Array, devices: int, experts: int, capacity: int) -> SendSlots:
    """Assigns a slot for its expert's device to every pair, in the order of tokens, as long as there are free slots."""
    queue = queue_by_device(ids_Tk.reshape(-1), devices, experts)
    n_pairs, n_slots = queue.device_N.size, devices * capacity
    fits_N = (queue.device_N < devices) & (queue.rank_N < capacity)
    slots_N = jnp.where(fits_N, queue.device_N * capacity + queue.rank_N, n_slots)
    slot = jnp.arange(capacity)
    pairs_nC = queue.order_N.at[queue.starts_n[:, None] + slot].get(mode="clip")
    pairs_nC = jnp.where(slot < queue.sizes_n[:, None], pairs_nC, n_pairs)
    dropped = jnp.maximum(queue.sizes_n - capacity, 0).sum().astype(jnp.float32)
    return SendSlots(pairs_nC.reshape(-1), slots_N.reshape(ids_Tk.shape), dropped)


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
    (tokens, choices), n, e = ids_Tk.shape, group_size(axes), experts.gate_EDF.shape[0]
    send = assign_slots(ids_Tk, n, e, send_capacity(tokens, choices, n, e, capacity_factor))
    exchange = partial(jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
    # An empty slot carries expert id E', which no device has.
    ids_M = (ids_Tk.reshape(-1) % e).at[send.pairs_M].get(mode="fill", fill_value=e)
    x_MD = exchange(tokens_to_slots(x_TD, send.pairs_M, send.slots_Tk))
    y_MD = exchange(compute_rows(x_MD, exchange(ids_M), experts, activation))
    # Gates are applied on the sending device, so neither they nor their gradients are sent.
    gates_M1 = tokens_to_slots(gates_Tk.reshape(-1, 1), send.pairs_M, send.slots_Tk.reshape(-1, 1))
    return slots_to_tokens(y_MD * gates_M1, send.pairs_M, send.slots_Tk), send.dropped
