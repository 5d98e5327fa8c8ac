"""Every chosen (token, expert) pair goes to the device of its expert and back, and nothing else does.

`jax.lax.ragged_all_to_all` sends each device as many rows as there are for it. Only the buffer in which they arrive
is of a fixed size; what does not fit there is not sent, and counted. XLA has it for TPUs and GPUs, not for CPUs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.errors import UserError
from composer_jax.ops.activation import Activation, swiglu
from composer_jax.ops.permutation import permute_tokens, unpermute_tokens
from composer_jax.ops.vma import match_vma, pcast_varying, varying_axes
from composer_jax.parallel.dispatch.compute import compute_chosen, compute_rows
from composer_jax.parallel.dispatch.contract import SPLIT, Dispatched, Experts, Split, devices_along, dispatched
from composer_jax.parallel.dispatch.queue import queue_for
from composer_jax.parallel.dispatch.share import in_parts

Collective = Callable[..., jax.Array]


def ragged_all_to_all(
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    experts: Experts,
    activation: Activation = swiglu,
    *,
    capacity_factor: float = 2.0,
    split: Split = SPLIT,
) -> Dispatched:
    """Exchanges exactly the rows there are; a device can receive capacity_factor times the mean.

    A pair that does not fit adds nothing to y, and its gate gets no gradient. Where more would arrive than fits, the
    senders get room in their order in the group, and of each sender the later tokens are dropped. Among devices with
    the same tokens, each sends its own part of them.

    Raises:
      UserError: the experts are spread over several CPU devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if split.group and device is not None and device.platform == "cpu":
        raise UserError(
            "dispatch='ragged_all_to_all' works between TPUs or GPUs, and these are CPU devices; "
            "use 'ring' or 'all_to_all'."
        )
    return ragged_through(
        jax.lax.ragged_all_to_all,
        x_TD,
        ids_Tk,
        gates_Tk,
        experts,
        activation,
        capacity_factor=capacity_factor,
        split=split,
    )


def ragged_through(
    collective: Collective,
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    experts: Experts,
    activation: Activation = swiglu,
    *,
    capacity_factor: float = 2.0,
    split: Split = SPLIT,
) -> Dispatched:
    """ragged_all_to_all by means of a collective that is called like jax.lax.ragged_all_to_all."""
    if not split.group:
        return dispatched(compute_chosen(x_TD, ids_Tk, gates_Tk, experts, activation), x_TD)
    compute = partial(
        _exchange,
        collective,
        experts=experts,
        activation=activation,
        axes=split.group,
        capacity_factor=capacity_factor,
    )
    y_TD, dropped = in_parts(compute, x_TD, ids_Tk, gates_Tk, split.alike)
    return dispatched(y_TD, x_TD, dropped)


class Parcels(NamedTuple):
    """What one device sends to and receives from each other: four arguments of the collective, int32 [n] each."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


class Plan(NamedTuple):
    there: Parcels
    back: Parcels
    dropped: jax.Array  # rows of this device that are not sent


def exchange_plan(sizes_nn, me, room: int, xp: Any = jnp) -> Plan:
    """The exchange in which device s has sizes[s,r] rows for device r and there is room for `room`; and its reverse.

    The first in the order of senders get the room: with a(s,r) the sum of sizes[s',r] over s' < s, the rows of s arrive
    at min(a, room) .. min(a + sizes[s,r], room). Those that a device sends lie in the order of receivers, none between.

    Args:
      sizes_nn: integers, the same on all devices.
      me: index of this device.
      room: rows of the buffer in which each device receives.
      xp: numpy or jax.numpy.
    """
    ends_nn = xp.cumsum(sizes_nn, axis=0)
    away_nn = xp.minimum(ends_nn - sizes_nn, room)
    sent_nn = xp.minimum(ends_nn, room) - away_nn
    home_nn = xp.cumsum(sent_nn, axis=1) - sent_nn
    there = Parcels(home_nn[me], sent_nn[me], away_nn[me], sent_nn[:, me])
    back = Parcels(away_nn[:, me], sent_nn[:, me], home_nn[:, me], sent_nn[me])
    return Plan(there, back, (sizes_nn[me] - sent_nn[me]).sum())


def room_of(tokens: int, choices: int, devices: int, experts: int, factor: float) -> int:
    """Rows that a device can receive: `factor` times the mean, in eights, and never more than there can be.

    Args: as capacity_of in all_to_all.py.
    """
    rows = math.ceil(factor * tokens * choices)
    return min(-(-rows // 8) * 8, devices * tokens * min(choices, experts))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchange(
    collective: Collective,
    axes: tuple[str, ...],
    rooms: tuple[int, int],
    x_ND: jax.Array,
    there: Parcels,
    back: Parcels,
) -> jax.Array:
    """What arrives, [rooms[0],D], zero where nothing does; x_ND has rooms[1] rows. Its gradient is the way back.

    JAX can transpose the collective too, by two more exchanges for the offsets, which are known here.
    """
    empty = pcast_varying(jnp.zeros((rooms[0], *x_ND.shape[1:]), x_ND.dtype), varying_axes(x_ND))
    return collective(x_ND, empty, *there, axis_name=axes)


def _backward(collective, axes, rooms, saved, dy_MD):
    there, back = saved
    return exchange(collective, axes, rooms[::-1], dy_MD, back, there), None, None


exchange.defvjp(lambda c, axes, rooms, x_ND, *parcels: (exchange(c, axes, rooms, x_ND, *parcels), parcels), _backward)


def _exchange(
    collective: Collective,
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
    ids_N = ids_Tk.reshape(-1)
    queue = queue_for(ids_N, n, e)
    rooms = room_of(*ids_Tk.shape, n, e, capacity_factor), ids_N.size
    sizes_nn = jax.lax.all_gather(queue.sizes_n, axes)
    there, back, dropped = exchange_plan(sizes_nn, jax.lax.axis_index(axes), rooms[0])

    # What is sent is sorted by expert, so that receivers know what is what from numbers of rows.
    sent_N = queue.place_N < jnp.append(there.send_sizes, 0)[queue.line_N]
    sent_ids_N = jnp.where(sent_N, ids_N, n * e)
    order_N = jnp.argsort(sent_ids_N)
    places_Tk = jnp.argsort(order_N).reshape(ids_Tk.shape)
    counts_E = jnp.bincount(sent_ids_N, length=n * e)
    arriving_E = jax.lax.all_to_all(counts_E, axes, split_axis=0, concat_axis=0, tiled=True)
    ids_M = _ids_of_rows(arriving_E, e, rooms[0])

    x_MD = exchange(collective, axes, rooms, permute_tokens(x_TD, order_N, places_Tk), there, back)
    y_MD = compute_rows(x_MD, ids_M, experts, activation)
    y_ND = exchange(collective, axes, rooms[::-1], y_MD, back, there)
    # Gates stay at home: they need not travel, nor do their gradients.
    gates_N1 = permute_tokens(gates_Tk.reshape(-1, 1), order_N, places_Tk.reshape(-1, 1))
    return unpermute_tokens(y_ND * gates_N1, order_N, places_Tk), dropped.astype(jnp.float32)


def _ids_of_rows(counts_E: jax.Array, experts: int, room: int) -> jax.Array:
    """The expert of every row of the buffer: counts_E of each expert from each sender; then E', whom nobody has."""
    ids = jnp.append(jnp.arange(counts_E.size) % experts, experts)
    return jnp.repeat(ids, jnp.append(counts_E, room - counts_E.sum()), total_repeat_length=room)
