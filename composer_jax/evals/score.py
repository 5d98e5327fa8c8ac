"""Scoring: the log-probability that a network gives to each token of a text after the tokens before it.

The rolling loss of a long text counts each token once, in rows whose context moves along: row r of `windows` holds the
tokens from r * stride on. All tokens of row 0 after the first are counted, and of every later row the last `stride`, so
that each has at least window - stride tokens before it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.decoder import all_gather_vocab, head_logits
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.models.predictions import Predictions
from composer_jax.observe.progress import Progress
from composer_jax.parallel import context
from composer_jax.parallel.mesh import BATCH_SPEC, batch_shards
from composer_jax.parallel.processes import device_put_global, gather_to_host
from composer_jax.train.forward import predict_positions

CHUNK = 256
"""Positions per device whose logits over the vocabulary exist at once, if only log-probabilities are returned."""


class TextScores(NamedTuple):
    """logprobs [B,S-1]: of tokens[:, 1:]; logits [B,S,W], or None if they were not requested. float32."""

    logprobs: np.ndarray
    logits: np.ndarray | None


def score(
    definition: ModelDef,
    params: Params,
    router_bias: Params,
    tokens_BS: np.ndarray,
    *,
    mesh: Mesh,
    rows: int = 1,
    logits: bool = False,
) -> TextScores:
    """Log-probabilities of whole rows, each a document of its own; several processes compute them together.

    Raises UserError for a shape, a token id or a length that the network does not support.

    Args:
      tokens_BS: integers [B,S], S at least 2; negative ids at the end of a row are padding (their scores are 0).
      rows: rows per device and call.
      logits: whether to return all logits, too.
    """
    check_tokens(tokens_BS, definition.config)
    (count, length), step, parts = tokens_BS.shape, rows * batch_shards(mesh), mesh.shape[context.AXIS]
    program = _program(definition, mesh, logits)
    padded_length = length if parts == 1 else math.ceil(length / (2 * parts)) * 2 * parts
    sharding, order = NamedSharding(mesh, BATCH_SPEC), context.zigzag_order(padded_length, parts)
    inverse = np.argsort(order)[:length]
    outputs = []
    with Progress(count, "row", "score") as progress:
        for start in range(0, count, step):
            part = tokens_BS[start : start + step]
            padded = np.full((step, padded_length), -1, np.int32)
            padded[: len(part), :length] = part  # int32 holds every id of a vocabulary
            out = program(params, router_bias, device_put_global(padded[:, order], sharding))
            outputs.append([gather_to_host(array)[: len(part)][:, inverse] for array in out])
            progress.update(len(part))
    logprobs, *rest = (np.concatenate(parts) for parts in zip(*outputs, strict=True))
    return TextScores(logprobs[:, :-1], rest[0] if logits else None)


def windows(ids: np.ndarray, length: int, stride: int | None = None) -> np.ndarray:
    """Divides a long text into rows [B,length] of which each begins `stride` tokens after the one before.

    The last row is padded with -1. Rows have at least two tokens. None is length - 1, with which rows share one token,
    so that every token but the first is predicted once.
    """
    stride = length - 1 if stride is None else stride
    starts = range(0, max(len(ids) - length + stride, 1), stride)
    rows = np.full((len(starts), length), -1, np.int32)
    for row, start in zip(rows, starts, strict=True):
        part = ids[start : start + length]
        row[: len(part)] = part
    return rows


def counted_predictions(rows: np.ndarray, stride: int) -> np.ndarray:
    """Returns bool[B,S-1]: the predictions of rows[:, 1:] that count.

    Row by row, they are the predictions of all tokens of the text but the first, in order.
    """
    counted = rows[:, 1:] >= 0
    counted[1:, : rows.shape[1] - 1 - stride] = False
    return counted


def nll_by_context(logprobs: np.ndarray, rows: np.ndarray) -> list[dict[str, Any]]:
    """Returns the mean loss by the tokens of context: 1, 2 to 3, 4 to 7, 8 to 15 and so on.

    All predictions of all rows go in, counted or not: with a stride that is short beside the window, the same tokens
    are predicted after contexts of every length.

    Args:
      logprobs: [B,S-1] of rows[:, 1:].
      rows: tokens [B,S] with padding of negative ids.

    Returns:
      {"first", "last": least and most tokens of context, "predictions", "nll": nats per token} of each bin that is not
      empty.
    """
    real = rows[:, 1:] >= 0
    predictions = real.sum(0)
    totals = -np.where(real, logprobs, 0).sum(0, dtype=np.float64)
    bins = []
    first, most = 1, rows.shape[1] - 1
    while first <= most:
        last = min(2 * first - 1, most)
        place = slice(first - 1, last)  # column c is predicted after c + 1 tokens
        if count := int(predictions[place].sum()):
            bins.append({"first": first, "last": last, "predictions": count, "nll": float(totals[place].sum() / count)})
        first = last + 1
    return bins


def check_tokens(tokens_BS: np.ndarray, config: ModelConfig) -> None:
    """Raises a UserError for a shape, a token id or a length that the network does not support."""
    if tokens_BS.ndim != 2 or not np.issubdtype(tokens_BS.dtype, np.integer) or 0 in tokens_BS.shape:
        raise UserError(f"tokens are {tokens_BS.dtype}{list(tokens_BS.shape)}; rows of integers [B,S] are needed.")
    if tokens_BS.shape[1] < 2:
        raise UserError("rows of one token have nothing to score; use at least two.")
    if tokens_BS.shape[1] > config.max_context:
        raise UserError(
            f"rows of {tokens_BS.shape[1]} tokens are longer than max_context={config.max_context} of the network."
        )
    if (largest := tokens_BS.max()) >= config.vocab_size:
        raise UserError(f"token id {largest} is beyond the vocabulary of {config.vocab_size}.")
    if (np.diff((tokens_BS < 0).astype(np.int8), axis=1) < 0).any() or (tokens_BS[:, 0] < 0).any():
        raise UserError("negative token ids are padding and stand at the end of a row only.")


def _program(definition: ModelDef, mesh: Mesh, logits: bool):
    """Returns the jitted function of (params, router_bias, tokens): (logprobs,) or (logprobs, logits)."""

    def program(params, router_bias, tokens_BS):
        decoder = definition.bind(params, router_bias)
        real_BS = tokens_BS >= 0
        tokens_BS = jnp.maximum(tokens_BS, 0)
        positions_BS = jnp.broadcast_to(context.local_positions(tokens_BS.shape[1]), tokens_BS.shape)
        states_BSD = decoder(tokens_BS, positions_BS, real_BS.astype(jnp.int32)).last_BSD
        next_BS, scored_BS = context.shift_left(tokens_BS), context.shift_left(real_BS)
        if logits:
            logits_BSW = head_logits(states_BSD, decoder.head_weight())
            return jnp.where(scored_BS, Predictions(logits_BSW).logprob(next_BS), 0), all_gather_vocab(logits_BSW)
        position = lambda predictions, token: predictions.logprob(token)  # noqa: E731
        return (jnp.where(scored_BS, predict_positions(decoder, position, CHUNK, (states_BSD,), next_BS), 0),)

    out = (BATCH_SPEC,) * (1 + logits)
    # Without VMA checks: JAX types the gathered logits as varying over `tensor`, though they are replicated.
    return jax.jit(
        jax.shard_map(
            program, mesh=mesh, in_specs=(*definition.specs(mesh), BATCH_SPEC), out_specs=out, check_vma=False
        )
    )
