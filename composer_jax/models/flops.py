"""Floating-point operations of a network, computed from its config alone."""

import dataclasses

import numpy as np

from composer_jax.models.attention_kinds import attention_kind
from composer_jax.models.config import ModelConfig
from composer_jax.ops import splash


def forward_flops(config: ModelConfig, tokens: int | np.ndarray) -> float:
    """Returns the operations of one forward pass over a document of `tokens` tokens, MTP modules included.

    An array gives the tokens of several documents, whose operations are added.

    Each multiplication of a matrix product counts as two: projections, chosen and shared experts, router, head, and the
    causal half of attention's scores and weighted values. A training step takes three times as many. Recomputation is
    not counted, so that this is the numerator of MFU (PaLM, arXiv 2204.02311, appendix B).
    """
    c = config
    projections, per_pair = attention_kind(config).cost(config)
    experts = 3 * c.d_model * c.expert_ff_dim * (c.experts_per_token + c.n_shared_experts) + c.d_model * c.n_experts
    dense = 3 * c.d_model * c.dense_ff_dim
    head = c.d_model * c.vocab_size
    module = c.n_mtp_modules * (2 * c.d_model**2 + projections + (experts if c.n_experts else dense) + head)
    dense_layers = c.n_layers - c.n_moe_layers
    per_token = c.n_layers * projections + dense_layers * dense + c.n_moe_layers * experts + head + module

    lengths = np.asarray(tokens, np.float64)

    def pairs_in(window: int | None) -> float:
        """Pairs of a query and a key that it attends to."""
        seen = lengths if window is None else np.minimum(lengths, window)
        return float((seen * (seen + 1) / 2 + (lengths - seen) * seen).sum())

    pairs = sum(pairs_in(c.sliding_window if c.has_window(layer) else None) for layer in range(c.n_layers))
    pairs += c.n_mtp_modules * pairs_in(None)
    return 2 * (float(lengths.sum()) * per_token + pairs * per_pair)


def training_flops(
    config: ModelConfig, tokens: int | np.ndarray, *, trains_mtp: bool = False, trains_trunk: bool = True
) -> float:
    """Returns the operations of a training step on a document of `tokens` tokens, or several, without recomputation.

    A backward pass takes twice those of the forward pass.

    Args:
      trains_mtp: whether the MTP modules are in the loss; they are not computed otherwise.
      trains_trunk: whether the rest has a backward pass.
    """
    of_trunk = forward_flops(dataclasses.replace(config, n_mtp_modules=0), tokens)
    of_modules = forward_flops(config, tokens) - of_trunk if trains_mtp else 0.0
    return (3 if trains_trunk else 1) * of_trunk + 3 * of_modules


def document_lengths(segments_BS: np.ndarray) -> np.ndarray:
    """Returns the tokens of each document in packed rows, int64 [documents].

    segments_BS: integers, the documents of a row numbered from 1; 0 is padding.
    """
    lengths = [np.bincount(row)[1:] for row in segments_BS]
    lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
    return lengths[lengths > 0]


def row_flops(config: ModelConfig, segments_S: np.ndarray) -> float:
    """Returns the operations of a forward pass over a packed row that depend on the documents in it.

    These are the experts that its tokens choose, and the blocks of attention that the TPU kernel computes. Padding has
    neither. It is in all other products, which therefore cost the same in every row of a batch.

    Args:
      segments_S: integers, the documents of the row numbered from 1; 0 is padding.
    """
    c, windows = config, {None, config.sliding_window}
    pairs = {window: splash.computed_pairs(segments_S, window) for window in windows}
    in_layers = sum(pairs[c.sliding_window if c.has_window(layer) else None] for layer in range(c.n_layers))
    moe_layers = c.n_moe_layers + (c.n_mtp_modules if c.n_experts else 0)
    experts = moe_layers * 3 * c.d_model * c.expert_ff_dim * c.experts_per_token
    per_pair = attention_kind(config).cost(config).per_pair
    return 2.0 * (np.count_nonzero(segments_S) * experts + (in_layers + c.n_mtp_modules * pairs[None]) * per_pair)
