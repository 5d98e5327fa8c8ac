"""The forward pass of a batch: hidden states, and functions of the predictions at its positions.

A batch is a dict of arrays whose fields train/losses.py describes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.models.decoder import Decoder, Hidden, head_logits
from composer_jax.models.predictions import Predictions
from composer_jax.models.router_replay import RouterReplay
from composer_jax.ops.chunks import map_chunks
from composer_jax.ops.shapes import check_shapes

Batch = dict[str, jax.Array]

POLICY_FIELDS = ("advantages", "ce_weights", "kl_weights", "sampler_logprobs", "reference_logprobs")
"""Fields of the policy loss beside `weights`; those that a batch lacks count as zeros."""


def hidden_states(decoder: Decoder, batch: Batch, *, plausibility: float = 0.0) -> Hidden:
    """The decoder's output for a batch, after a check of the batch's shapes and dtypes.

    Args:
      plausibility: of the replay of a batch with routes (models/router_replay.py).

    Raises:
      AssertionError: a field has another shape or dtype than the module's docstring says.
    """
    check_shapes(
        tokens_BS=(batch["tokens"], jnp.int32),
        positions_BS=(batch["positions"], jnp.int32),
        segments_BS=(batch["segments"], jnp.int32),
        weights_BS=(batch["weights"], jnp.float32),
        **{f"{name}_BS": (batch.get(name), jnp.float32) for name in POLICY_FIELDS},
        routes_BSLk=(batch.get("routes"), jnp.integer),
    )
    replay = RouterReplay(batch["routes"], plausibility) if "routes" in batch else None
    with jax.named_scope("trunk"):
        return decoder(batch["tokens"], batch["positions"], batch["segments"], replay)


def predict_positions(
    decoder: Decoder,
    function: Callable,
    chunk: int | None,
    states: tuple[jax.Array, ...],
    *arrays_BS: jax.Array,
    trains_head: Sequence[bool] = (),
) -> Any:
    """Applies `function` to the predictions at every position; returns its tree of arrays, [B,S] each.

    Args:
      function: (one Predictions per array of `states`, then `arrays_BS`, flattened to [T]) -> tree of arrays [T].
      chunk: number of positions whose logits exist at the same time; None: all.
      states: normalised states [B,S,D], compute dtype.
      trains_head: for each of `states`, whether the head's weight gets a gradient from it; empty: from all.
    """
    dims = check_shapes(states_BSD=(states[0], jnp.floating))
    for states_BSD in states:
        check_shapes(dims, states_BSD=(states_BSD, states[0].dtype))
    for array_BS in arrays_BS:
        check_shapes(dims, array_BS=(array_BS, array_BS.dtype))

    def piece(weight_DW, *inputs):
        frozen_DW = jax.lax.stop_gradient(weight_DW)
        weights = [weight_DW if trains else frozen_DW for trains in trains_head or len(states) * (True,)]
        pairs = zip(inputs[: len(states)], weights, strict=True)
        predictions = [Predictions(head_logits(h_TD, w_DW)) for h_TD, w_DW in pairs]
        return function(*predictions, *inputs[len(states) :])

    with jax.named_scope("head"):
        flat = [array.reshape(-1, *array.shape[2:]) for array in (*states, *arrays_BS)]
        out = map_chunks(piece, chunk, decoder.head_weight(), *flat)
        return jax.tree.map(lambda array: array.reshape(states[0].shape[:2]), out)
