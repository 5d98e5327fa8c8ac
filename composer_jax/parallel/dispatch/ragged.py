"""ragged_all_to_all dispatch: sends exactly the chosen (token, expert) pairs to the devices of their experts.

`jax.lax.ragged_all_to_all` sends each device as many rows as there are for it. Only the receive buffer has a fixed
size; rows that do not fit are not sent, and are counted. XLA has this collective for TPUs and GPUs, not for CPUs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from composer_jax.errors import UserError
from composer_jax.ops.activation import Activation
from composer_jax.ops.permutation import permute_tokens, unpermute_tokens
from composer_jax.ops.vma import match_vma, pcast_varying, varying_axes
from composer_jax.parallel.dispatch.compute import compute_chosen_experts, compute_rows
from composer_jax.parallel.dispatch.contract import DispatchAxes, Experts, group_size

Collective = Callable[..., jax.Array]


def ragged_all_to_all(
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    experts: Experts,
    activation: Activation,
    *,
    capacity_factor: float,
    axes: DispatchAxes,
    collective: Collective = jax.lax.ragged_all_to_all,
) -> tuple[jax.Array, jax.Array | None]:
    """Exchanges exactly the chosen rows; a device can receive capacity_factor times the mean.

    A pair that does not fit adds nothing to y, and its gate gets no gradient. If more rows than fit are addressed to a
    device, the senders get room in their order in the group, and each drops its later tokens. Devices with replicated
    tokens each send their own part of them.

    Args:
      collective: a function with the signature of jax.lax.ragged_all_to_all; tests on CPUs emulate it.

    Raises:
      UserError: the experts are divided over several CPU devices.
    """
    if not axes.group:
        return compute_chosen_experts(x_TD, ids_Tk, gates_Tk, experts, activation), None
    device = jax.sharding.get_abstract_mesh().abstract_device
    if collective is jax.lax.ragged_all_to_all and device is not None and device.platform == "cpu":
        raise UserError(
            "dispatch='ragged_all_to_all' works between TPUs or GPUs, and these are CPU devices; use 'ring'."
        )
    compute = partial(
        _exchange,
        collective,
        experts=experts,
        activation=activation,
        axes=axes.group,
        capacity_factor=capacity_factor,
    )
    return _split_replicated_tokens(compute, x_TD, ids_Tk, gates_Tk, axes.replicated_axes)


class Offsets(NamedTuple):
    """Offsets and sizes, in rows, of what one device sends to and receives from each other: int32 [n] each.

    They are the arguments of the same names of jax.lax.ragged_all_to_all.
    """

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


class ExchangePlan(NamedTuple):
    """Both exchanges of a dispatch."""

    dispatch: Offsets  # tokens to the devices of their experts
    combine: Offsets  # results back to the devices of their tokens
    dropped: jax.Array  # rows of this device that are not sent


def plan_exchange(sizes_nn, me, capacity: int, xp: Any = jnp) -> ExchangePlan:
    """Plans the exchange in which device s has sizes[s,r] rows for device r, and its reverse.

    Earlier senders get the room: with a(s,r) the sum of sizes[s',r] over s' < s, the rows of s arrive at
    min(a, capacity) .. min(a + sizes[s,r], capacity). The rows that a device sends are contiguous, in the order of
    receivers.

    Args:
      sizes_nn: integers, the same on all devices.
      me: index of this device.
      capacity: rows of the receive buffer of every device.
      xp: numpy or jax.numpy.
    """
    ends_nn = xp.cumsum(sizes_nn, axis=0)
    output_offsets_nn = xp.minimum(ends_nn - sizes_nn, capacity)
    sent_nn = xp.minimum(ends_nn, capacity) - output_offsets_nn
    input_offsets_nn = xp.cumsum(sent_nn, axis=1) - sent_nn
    dispatch = Offsets(input_offsets_nn[me], sent_nn[me], output_offsets_nn[me], sent_nn[:, me])
    combine = Offsets(output_offsets_nn[:, me], sent_nn[:, me], input_offsets_nn[:, me], sent_nn[me])
    return ExchangePlan(dispatch, combine, (sizes_nn[me] - sent_nn[me]).sum())


def receive_capacity(tokens: int, choices: int, devices: int, experts: int, factor: float) -> int:
    """Returns the rows that a device can receive: `factor` times the mean, a multiple of 8, at most all pairs.

    Args:
      tokens: of one device.
      choices: experts per token.
      devices: in the group.
      experts: per device.
      factor: the capacity factor.
    """
    rows = math.ceil(factor * tokens * choices)
    return min(-(-rows // 8) * 8, devices * tokens * min(choices, experts))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchange_rows(
    collective: Collective,
    axes: tuple[str, ...],
    sizes: tuple[int, int],
    x_ND: jax.Array,
    forward: Offsets,
    reverse: Offsets,
) -> jax.Array:
    """Returns the received rows [sizes[0],D], zero where nothing arrives; x_ND has sizes[1] rows.

    The gradient is the reverse exchange. JAX can transpose the collective too, with two more exchanges for the offsets,
    which are known here.
    """
    empty = pcast_varying(jnp.zeros((sizes[0], *x_ND.shape[1:]), x_ND.dtype), varying_axes(x_ND))
    return collective(x_ND, empty, *forward, axis_name=axes)


def _exchange_backward(collective, axes, sizes, offsets, dy_MD):
    forward, reverse = offsets
    return exchange_rows(collective, axes, sizes[::-1], dy_MD, reverse, forward), None, None


exchange_rows.defvjp(
    lambda collective, axes, sizes, x_ND, *offsets: (exchange_rows(collective, axes, sizes, x_ND, *offsets), offsets),
    _exchange_backward,
)


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
    (tokens, choices), n, e = ids_Tk.shape, group_size(axes), experts.gate_EDF.shape[0]
    ids_N = ids_Tk.reshape(-1)
    queue = _queue_by_device(ids_N, n, e)
    capacity = receive_capacity(tokens, choices, n, e, capacity_factor)
    sizes_nn = jax.lax.all_gather(queue.sizes_n, axes)
    dispatch, combine, dropped = plan_exchange(sizes_nn, jax.lax.axis_index(axes), capacity)

    # Sent rows are sorted by expert, so that the counts tell a receiver the expert of every row.
    sent_N = queue.rank_N < jnp.append(dispatch.send_sizes, 0)[queue.device_N]
    sent_ids_N = jnp.where(sent_N, ids_N, n * e)
    order_N = jnp.argsort(sent_ids_N)
    inverse_Tk = jnp.argsort(order_N).reshape(ids_Tk.shape)
    counts_E = jnp.bincount(sent_ids_N, length=n * e)
    received_E = jax.lax.all_to_all(counts_E, axes, split_axis=0, concat_axis=0, tiled=True)
    ids_M = _received_ids(received_E, e, capacity)

    sizes = capacity, ids_N.size
    sent_ND = permute_tokens(x_TD, order_N, inverse_Tk)
    x_MD = cast(jax.Array, exchange_rows(collective, axes, sizes, sent_ND, dispatch, combine))
    y_MD = compute_rows(x_MD, ids_M, experts, activation)
    y_ND = exchange_rows(collective, axes, sizes[::-1], y_MD, combine, dispatch)
    # Gates are applied on the sending device, so neither they nor their gradients are sent.
    gates_N1 = permute_tokens(gates_Tk.reshape(-1, 1), order_N, inverse_Tk.reshape(-1, 1))
    return unpermute_tokens(y_ND * gates_N1, order_N, inverse_Tk), dropped.astype(jnp.float32)


def _received_ids(counts_E: jax.Array, experts: int, capacity: int) -> jax.Array:
    """Returns the expert of every row of the receive buffer, E' (no expert) in empty rows.

    counts_E: rows for each of this device's experts from each sender, senders first.
    """
    ids = jnp.append(jnp.arange(counts_E.size) % experts, experts)
    return jnp.repeat(ids, jnp.append(counts_E, capacity - counts_E.sum()), total_repeat_length=capacity)


class _DeviceQueues(NamedTuple):
    """The pairs for each of n devices in the order of tokens, and a last queue of pairs without an expert (id -1)."""

    device_N: jax.Array  # int32, the device of a pair's expert; n if it has none
    rank_N: jax.Array  # int32, the number of pairs before it in its queue
    sizes_n: jax.Array  # int32, pairs in each queue


def _queue_by_device(ids_N: jax.Array, devices: int, experts: int) -> _DeviceQueues:
    """Queues the pairs with expert ids `ids_N` for `devices` devices of `experts` experts each."""
    device_N = jnp.where(ids_N < 0, devices, ids_N // experts).astype(jnp.int32)
    order_N = jnp.argsort(device_N)  # stable: pairs of one queue stay in the order of tokens
    sizes = jnp.bincount(device_N, length=devices + 1).astype(jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    return _DeviceQueues(device_N, jnp.argsort(order_N) - starts[device_N], sizes[:-1])


def _split_replicated_tokens(
    compute: Callable[..., tuple[jax.Array, jax.Array]],
    x_TD: jax.Array,
    ids_Tk: jax.Array,
    gates_Tk: jax.Array,
    axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """Applies compute(x, ids, gates) -> (y, dropped) to each device's part of tokens that are replicated over `axes`.

    If the tokens do not divide evenly, rows with expert id -1 pad the last part. The output is replicated again.
    """
    if not axes:
        return compute(x_TD, ids_Tk, gates_Tk)
    rows = x_TD.shape[0]
    pad = lambda a, value=0: jnp.pad(a, ((0, -rows % group_size(axes)), (0, 0)), constant_values=value)  # noqa: E731
    y_TD, dropped = compute(
        _slice_replicated(pad(x_TD), axes), _slice(pad(ids_Tk, -1), axes), _slice_replicated(pad(gates_Tk), axes)
    )
    return _all_gather(y_TD, axes)[:rows], jax.lax.psum(dropped, axes)


def _slice(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    rows = a.shape[0] // group_size(axes)
    return jax.lax.dynamic_slice_in_dim(a, jax.lax.axis_index(axes) * rows, rows)


def _all_gather(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.all_gather(a, axes, axis=0, tiled=True, to="invarying")


# The gradient all-gathers the parts. Autodiff would psum arrays that are zero outside one part: twice the bytes.
_slice_replicated = jax.custom_vjp(_slice, nondiff_argnums=(1,))
_slice_replicated.defvjp(lambda a, axes: (_slice(a, axes), None), lambda axes, _, da: (_all_gather(da, axes),))
