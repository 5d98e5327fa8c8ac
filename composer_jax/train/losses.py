"""Losses: pure functions of a bound Decoder and a batch, summed over this device's tokens.

A batch is a dict of arrays [B,S]: tokens, positions, segments (0 = padding), weights, and for the policy loss also
advantages and sampler_logprobs. Entry t of the last three concerns the *prediction of* tokens[t], that is, the
output at t-1;
they are zero at the first token of a segment. Every loss is divided by a normaliser that the caller computes once for
the global batch, so that summing over devices and accumulation steps gives the loss of the whole batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.models.decoder import Decoder, Hidden

Batch = dict[str, jax.Array]


class LossOutput(NamedTuple):
    """loss: this device's share. sums / maxima: what is added / maximised over devices and accumulation steps."""

    loss: jax.Array
    sums: dict[str, Any]
    maxima: dict[str, jax.Array]


Loss = Callable[[Decoder, Batch, jax.Array], LossOutput]


def forward(decoder: Decoder, batch: Batch) -> tuple[Hidden, jax.Array]:
    """Hidden states and float32 logits [B,S,W]."""
    with jax.named_scope("trunk"):
        hidden = decoder(batch["tokens"], batch["positions"], batch["segments"])
    with jax.named_scope("head"):
        return hidden, decoder.logits(hidden.last_BSD)


def shifted_logprobs(logits_BSW: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """log p(tokens[t] | tokens[<t]) at index t, float32 [B,S]; zero at index 0."""
    logprobs = jax.nn.log_softmax(logits_BSW[:, :-1])
    chosen = jnp.take_along_axis(logprobs, tokens_BS[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


@dataclasses.dataclass(frozen=True)
class LanguageLoss:
    """Weighted cross-entropy plus, optionally, self-distillation of the MTP module.

    L = 1/N sum_t w_t * -log p(x_t) + mtp_weight/N sum_t w_t * KL(main distribution of x_t || MTP distribution of x_t),
    the teacher being the main head one position later (Composer 2 report, arXiv 2603.24477, section 3: "predict the
    exact
    logit distribution of the main LM head"). The trunk gets no gradient from the second term (not published; ours).
    """

    mtp_weight: float = 0.0

    def __call__(self, decoder: Decoder, batch: Batch, normaliser: jax.Array) -> LossOutput:
        hidden, logits = forward(decoder, batch)
        nll = -(batch["weights"] * shifted_logprobs(logits, batch["tokens"])).sum()
        loss = nll / normaliser
        sums = {"nll": nll, "tokens": batch["weights"].sum(), "counts": {"moe_layers": hidden.counts_LE}}
        if self.mtp_weight:
            divergence, counts = mtp_divergence(decoder, hidden, logits, batch)
            loss = loss + self.mtp_weight * divergence / normaliser
            sums |= {"mtp_kl": divergence, "counts": sums["counts"] | {"mtp": counts}}
        return LossOutput(loss, sums, {})


def mtp_divergence(
    decoder: Decoder, hidden: Hidden, logits_BSW: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """sum_t w_{t+2} KL(softmax(main at t+1) || softmax(MTP at t)), both predicting token t+2, and the expert counts."""
    states, counts = decoder.mtp_hidden(hidden, batch["tokens"], batch["positions"], batch["segments"])
    teacher = jax.lax.stop_gradient(jax.nn.log_softmax(logits_BSW[:, 1:-1]))
    student = jax.nn.log_softmax(decoder.logits(states)[:, :-2])
    same_document = batch["segments"][:, :-2] == batch["segments"][:, 2:]
    weights = batch["weights"][:, 2:] * same_document
    return (weights * (jnp.exp(teacher) * (teacher - student)).sum(-1)).sum(), counts


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Importance-weighted policy gradient with a trust region on the ratio to the sampler's probabilities.

    L = -1/Z sum_t sg[r_t 1(1 - low < r_t < 1 + high)] A_t log p(x_t),   r_t = p(x_t) / p_sampler(x_t)

    (GLM-5's double-sided token mask; Z is a constant of the batch as in Dr. GRPO, arXiv 2503.20783). The algorithm
    (rl/algorithm.py) made the advantages; this loss does not know it.
    """

    ratio_low: float
    ratio_high: float

    def __call__(self, decoder: Decoder, batch: Batch, normaliser: jax.Array) -> LossOutput:
        hidden, logits = forward(decoder, batch)
        logprobs = shifted_logprobs(logits, batch["tokens"])
        sampled = batch["weights"] > 0
        log_ratio = jnp.where(sampled, jax.lax.stop_gradient(logprobs) - batch["sampler_logprobs"], 0.0)
        ratio = jnp.exp(log_ratio)
        trusted = (ratio > 1 - self.ratio_low) & (ratio < 1 + self.ratio_high)
        weight = batch["weights"] * ratio * trusted * batch["advantages"]
        entropy = -(jax.nn.softmax(logits[:, :-1]) * jax.nn.log_softmax(logits[:, :-1])).sum(-1)
        sums = {
            "tokens": sampled.sum().astype(jnp.float32),
            "entropy": (entropy * sampled[:, 1:]).sum(),
            "masked": (sampled & ~trusted).sum().astype(jnp.float32),
            "k1": -log_ratio.sum(),
            "counts": {"moe_layers": hidden.counts_LE},
        }
        return LossOutput(-(weight * logprobs).sum() / normaliser, sums, {"log_ratio": jnp.abs(log_ratio).max()})
