"""What a network thinks of given tokens: the log-probability of each after those before it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.definition import Definition, Params
from composer_jax.observe.progress import Progress
from composer_jax.parallel.mesh import BATCH_AXES, batch_shards
from composer_jax.parallel.processes import fetch, place
from composer_jax.train.losses import shifted_logprobs

CHUNK = 256
"""Positions whose logits over the vocabulary exist at once, per row, where only log-probabilities are asked for."""


class Scores(NamedTuple):
    """logprobs [B,S-1]: of tokens[:, 1:]; logits [B,S,W], or None where they were not asked for. float32."""

    logprobs: np.ndarray
    logits: np.ndarray | None


def score(
    definition: Definition,
    params: Params,
    router_bias: Params,
    tokens_BS: np.ndarray,
    *,
    mesh: Mesh,
    rows: int = 1,
    logits: bool = False,
) -> Scores:
    """Log-probabilities of whole rows, each a document of its own; several processes compute them together.

    Args:
      tokens_BS: integers [B,S], S at least 2; negative ids at the end of a row are padding (their scores are 0).
      rows: per device and call.
      logits: whether to return all logits, too.

    Raises:
      UserError: a shape, a token id or a length that the network does not have.
    """
    check_tokens(tokens_BS, definition.config)
    count, step = len(tokens_BS), rows * batch_shards(mesh)
    program = _program(definition, mesh, logits)
    spread = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    found = []
    with Progress(count, "row", "score") as progress:
        for start in range(0, count, step):
            part = tokens_BS[start : start + step]
            padded = np.full((step, tokens_BS.shape[1]), -1, np.int32)
            padded[: len(part)] = part  # int32: what a vocabulary has fits
            out = program(params, router_bias, place(padded, spread))
            found.append([fetch(array)[: len(part)] for array in out])
            progress.update(len(part))
    logprobs, *rest = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Scores(logprobs, rest[0] if logits else None)


def windows(ids: np.ndarray, length: int) -> np.ndarray:
    """A long text as rows [B,length] that share one token each, so that every token but the first is scored once; the
    last row is padded with -1. Rows have at least two tokens."""
    starts = range(0, max(len(ids) - 1, 1), length - 1)
    rows = np.full((len(starts), length), -1, np.int32)
    for row, start in zip(rows, starts, strict=True):
        part = ids[start : start + length]
        row[: len(part)] = part
    return rows


def check_tokens(tokens_BS: np.ndarray, config: ModelConfig) -> None:
    """Raises a UserError for a shape, a token id or a length that the network does not have."""
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


def _program(definition: Definition, mesh: Mesh, logits: bool):
    """The jitted function of (params, router_bias, tokens): (logprobs,) or (logprobs, logits)."""

    def program(params, router_bias, tokens_BS):
        decoder = definition.bind(params, router_bias)
        real_BS = tokens_BS >= 0
        tokens_BS = jnp.maximum(tokens_BS, 0)
        positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
        hidden_BSD = decoder(tokens_BS, positions_BS, real_BS.astype(jnp.int32)).last_BSD
        if logits:
            logits_BSW = decoder.logits(hidden_BSD)
            return jnp.where(real_BS, shifted_logprobs(logits_BSW, tokens_BS), 0)[:, 1:], logits_BSW

        def chosen(hidden_BSD, next_BS):
            logits_BSW = decoder.logits(hidden_BSD)
            picked = jnp.take_along_axis(logits_BSW, next_BS[..., None], axis=-1)[..., 0]
            return picked - jax.nn.logsumexp(logits_BSW, axis=-1)

        pieces = math.ceil((tokens_BS.shape[1] - 1) / CHUNK)
        padding = pieces * CHUNK - (tokens_BS.shape[1] - 1)

        def cut(array_BS):
            """[pieces, B, CHUNK, ...]"""
            array_BS = jnp.pad(array_BS, ((0, 0), (0, padding)) + ((0, 0),) * (array_BS.ndim - 2))
            return jnp.moveaxis(array_BS.reshape(array_BS.shape[0], pieces, CHUNK, *array_BS.shape[2:]), 1, 0)

        found = jax.lax.map(lambda piece: chosen(*piece), (cut(hidden_BSD[:, :-1]), cut(tokens_BS[:, 1:])))
        logprobs_BS = jnp.moveaxis(found, 0, 1).reshape(tokens_BS.shape[0], -1)[:, : tokens_BS.shape[1] - 1]
        return (jnp.where(real_BS[:, 1:], logprobs_BS, 0),)

    rows = PartitionSpec(BATCH_AXES)
    return jax.jit(
        jax.shard_map(
            program, mesh=mesh, in_specs=(*definition.specs(), rows), out_specs=(rows, rows) if logits else (rows,)
        )
    )
