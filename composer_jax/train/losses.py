"""Losses: pure functions of a bound Decoder and a batch, summed over this device's tokens.

A batch is a dict of arrays [B,S]: tokens, positions and segments (int32; segment 0 is padding), weights (float32), and
for the policy loss the float32 arrays of POLICY_FIELDS. Under router replay it has routes as well, uint8 or int16
[B,S,L,k]: the k experts that the sampler chose for tokens[t] in each of L expert layers, NO_ROUTE where unknown. Under
feedback it has the states of a teacher for some of its tokens (train/teacher_kl.py). Entry t of a float32 array [B,S]
belongs to the *prediction of* tokens[t], which is the output at t-1; it is zero at the first token of a segment. The
losses shift these arrays left to the position of that output. Every loss is divided by normalisers that the caller
computes once for the global batch, so that the sum over devices and accumulation steps is the loss of the whole batch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.errors import UserError
from composer_jax.extensions import resolve
from composer_jax.models.decoder import Decoder
from composer_jax.models.predictions import Predictions
from composer_jax.models.router_stats import RouterStats
from composer_jax.parallel import context
from composer_jax.train.forward import Batch, hidden_states, predict_positions
from composer_jax.train.teacher_kl import teacher_kl
from composer_jax.train.trust_region import TRUST_REGIONS, Bounds


class LossOutput(NamedTuple):
    """Output of a loss for this device's tokens."""

    loss: jax.Array
    """float32 []: this device's share of the loss."""
    sums: dict[str, Any]
    """Float32 metrics that are added over devices and accumulation steps."""
    maxima: dict[str, Any]
    """Float32 metrics whose maximum is taken over devices and accumulation steps. Under QK-clip it has what
    `logit_maxima` returns."""


class LossTermNormalisers(NamedTuple):
    """What the policy loss divides each of its terms by, for the global batch: a constant, or a count."""

    policy: Any
    """Of the policy gradient; a float or float32 []."""
    cross_entropy: Any
    kl: Any
    feedback: Any = None
    """Of the KL to a teacher; None where no batch has one, so that programs get no argument for it."""


Normalisers = Any
"""A number (float32 [] inside a program) for losses of one term; a LossTermNormalisers, or a number for all
terms, for the policy loss."""

Loss = Callable[[Decoder, Batch, Normalisers], LossOutput]
"""A loss may have a method `trains(name)`: whether it trains a top-level subtree of params. The Learner leaves the
other subtrees as they are, with their routers' biases; without the method it updates all params."""


@dataclasses.dataclass(frozen=True)
class LanguageLossConfig:
    """The loss of continued pretraining and SFT.

    Raises:
      UserError: an unknown name, or a negative weight; the message names the field.
    """

    name: str = "language"
    """One of LOSSES, or the import path of a function LanguageLossConfig -> Loss."""
    mtp_weight: float = 0.0
    """Weight of the self-distillation of the multi-token-prediction modules; 0 leaves them out. Not published
    (DeepSeek-V3 weighs its own MTP loss by 0.3, later 0.1)."""
    mtp_target: Literal["distillation", "cross_entropy"] = "distillation"
    """What the modules learn: the main head's distribution (Composer 2), or the token (DeepSeek-V3)."""
    trained: Literal["all", "mtp"] = "all"
    """Which weights learn: "all", or "mtp" for the modules alone, on a network that stays as it is (the first of two
    stages in Composer 2's report, section 3)."""
    balance_weight: float = 0.0
    """Weight of the sequence-wise balance loss of the experts (DeepSeek-V3: 1e-4)."""

    def __post_init__(self):
        _require_known(self.name)
        for field, values in (("mtp_target", ("distillation", "cross_entropy")), ("trained", ("all", "mtp"))):
            if getattr(self, field) not in values:
                either = " or ".join(map(repr, values))
                raise UserError(f"loss.{field}={getattr(self, field)!r} is unknown; use {either}.")
        if self.trained == "mtp" and not self.mtp_weight > 0:
            raise UserError(f"loss.trained='mtp' needs mtp_weight above 0, but mtp_weight={self.mtp_weight}.")
        for field in ("mtp_weight", "balance_weight"):
            if not getattr(self, field) >= 0:
                raise UserError(f"loss.{field}={getattr(self, field)} is negative; use 0 or more.")


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """The loss of reinforcement learning.

    Raises:
      UserError: an unknown name, or a width out of range; the message names the field.
    """

    name: str = "policy_gradient"
    """One of LOSSES, or the import path of a function PolicyLossConfig -> Loss."""
    trust_region: str = "clip"
    """What happens to tokens whose importance ratio is out of bounds (train/trust_region.py): "clip" (PPO) leaves out
    those that moved in the direction of their advantage, "mask" (GLM-5, IcePop, K2.5) all of them, and "clamp" (CISPO)
    bounds their weight. Or the import path of such a function."""
    ratio_low: float = 0.2
    """Width of the trust region: the lower bound is 1 - ratio_low (DAPO, arXiv 2503.14476: 0.2)."""
    ratio_high: float = 0.28
    """Width of the trust region: the upper bound is 1 + ratio_high (DAPO: 0.28)."""
    dual_clip: float = 3.0
    """c of dual clip: "clip" also leaves out tokens of negative advantage whose ratio is above c, which PPO would weigh
    by that ratio without a bound (Ye et al., arXiv 1912.09729: 3, as in verl's clip_ratio_c); `inf` bounds nothing.
    Matters where the sampler's weights are old (rl.max_staleness above 0)."""
    replay_plausibility: float = 0.5
    """Router replay (rl.router_replay) replaces a sampler's expert whose score in the learner is below this times the
    lowest score of the learner's own choice; 0 replays all (Composer 2 has the filter, the factor is not published)."""

    def __post_init__(self):
        _require_known(self.name)
        if ":" not in self.trust_region:
            resolve(self.trust_region, TRUST_REGIONS, "loss.trust_region")
        for field in ("ratio_low", "ratio_high"):
            if not getattr(self, field) > 0:
                raise UserError(f"loss.{field}={getattr(self, field)} trusts no token; use a number above 0.")
        if self.trust_region == "clip" and not self.dual_clip >= 1 + self.ratio_high:
            raise UserError(
                f"loss.dual_clip={self.dual_clip} lies inside the trust region, which ends at 1 + loss.ratio_high="
                f"{1 + self.ratio_high}; use that or more, 'inf' for no bound."
            )
        if not 0 <= self.replay_plausibility <= 1:
            raise UserError(
                f"loss.replay_plausibility={self.replay_plausibility} is not between 0 and 1; 0 replays all experts."
            )


def make_loss(config: LanguageLossConfig | PolicyLossConfig) -> Loss:
    """Builds the loss that `config` names.

    Raises:
      UserError: an import path that does not resolve.
    """
    return resolve(config.name, LOSSES, "loss.name")(config)


def _require_known(name: str) -> None:
    if ":" not in name:
        resolve(name, LOSSES, "loss.name")


@dataclasses.dataclass(frozen=True)
class LanguageLoss:
    """Weighted cross-entropy, plus the loss of the MTP modules and balance of the experts.

    L = 1/N sum_t w_t * -log p(x_t)
        + mtp_weight/N mean over modules k of sum_t w_t * KL(main distribution of x_t || that of module k)
        + balance_weight/N sum over rows and MoE layers of models/router_stats.py's sequence-wise balance,

    The teacher of module k is the main head k positions later (Composer 2 report, arXiv 2603.24477, section 3: "predict
    the exact logit distribution of the main LM head"; the mean is DeepSeek-V3's, equation 25). With
    mtp_target="cross_entropy" the KL is -log p(x_t) of module k instead. The second term trains the modules alone:
    trunk, embedding and head get no gradient from it (not published; ours). The third term is balance_weight per token
    and layer where load is even.
    """

    config: LanguageLossConfig = dataclasses.field(default_factory=LanguageLossConfig)

    def trains(self, name: str) -> bool:
        """Returns whether the loss trains a subtree of params; it leaves out MTP modules that have no weight."""
        return bool(self.config.mtp_weight) if name == "mtp" else self.config.trained == "all"

    def __call__(self, decoder: Decoder, batch: Batch, normaliser: jax.Array) -> LossOutput:
        hidden = hidden_states(decoder, batch)
        states, router_stats = (hidden.last_BSD,), {"moe_layers": hidden.router_stats}
        max_logits = dict(hidden.max_logits or {})
        if self.config.balance_weight and hidden.router_stats is None:
            raise UserError(
                f"balance_weight={self.config.balance_weight} needs experts, but n_experts=0; set balance_weight=0."
            )
        if self.config.mtp_weight:
            if not decoder.config.n_mtp_modules:
                raise UserError(
                    f"mtp_weight={self.config.mtp_weight} needs MTP modules, but n_mtp_modules=0; change one of them."
                )
            fields = batch["tokens"], batch["positions"], batch["segments"]
            mtp_MBSD, router_stats["mtp"], mtp_max_logits = decoder.mtp_hidden(hidden, *fields)
            max_logits |= {} if mtp_max_logits is None else {"mtp": mtp_max_logits}
            # Module k predicts a token k positions before the main head does: shift its states to the main head's.
            states += tuple(_shift_right_by(mtp_BSD, k) for k, mtp_BSD in enumerate(mtp_MBSD, start=1))

        distils = self.config.mtp_target == "distillation"

        def at_position(main: Predictions, *rest):
            *students, token = rest
            losses = (main.divergence(student) if distils else -student.logprob(token) for student in students)
            return main.logprob(token), *losses

        tokens_BS, chunk = context.shift_left(batch["tokens"]), decoder.config.head_chunk
        trains_head = (True, *(len(states) - 1) * (False,))
        logprobs_BS, *mtp_losses = predict_positions(
            decoder, at_position, chunk, states, tokens_BS, trains_head=trains_head
        )
        weights_BS = context.shift_left(batch["weights"])
        nll = -(weights_BS * logprobs_BS).sum()
        loss = nll / normaliser
        sums = {"nll": nll, "tokens": batch["weights"].sum()} | router_sums(router_stats)
        if mtp_losses:
            # Module k read position t - k and predicts token t + 1: both must be of one document.
            segments_BS, target_BS = batch["segments"], context.shift_left(batch["segments"])
            same = [target_BS == _shift_right_by(segments_BS, k) for k in range(1, 1 + len(mtp_losses))]
            total = sum((weights_BS * mask * term).sum() for mask, term in zip(same, mtp_losses, strict=True))
            sums["mtp_kl" if distils else "mtp_nll"] = total / len(mtp_losses)
            loss = loss + self.config.mtp_weight * total / len(mtp_losses) / normaliser
        if self.config.balance_weight:
            balance = sum(stats.sequence_balance.sum() for stats in router_stats.values() if stats is not None)
            loss = loss + self.config.balance_weight * balance / normaliser
            sums["sequence_balance"] = balance
        return LossOutput(loss, sums, logit_maxima(max_logits))


def logit_maxima(max_logits: dict[str, jax.Array] | None) -> dict[str, Any]:
    """The entry of LossOutput.maxima that QK-clip needs of every loss: "attention_logits", float32 [L,H] by stack.

    max_logits: Hidden.max_logits, and under "mtp" those of the MTP modules; None or empty where they are not measured.
    """
    return {"attention_logits": max_logits} if max_logits else {}


def router_sums(router_stats: dict[str, RouterStats | None]) -> dict[str, Any]:
    """The router metrics of every loss: "counts" of tokens per expert, by stack, all "dropped" choices, and the sum
    "router_entropy" (RouterStats.entropy).

    Under router replay also the counts of choices that came with the tokens (ReplayStats): "replayed", and of these
    "replay_foreign" and "replay_filtered".

    router_stats: None for a stack without experts. Without any experts there are no metrics.
    """
    measured = {name: stats for name, stats in router_stats.items() if stats is not None}
    if not measured:
        return {}
    sums = {
        "counts": {name: stats.counts_E for name, stats in measured.items()},
        "dropped": sum(stats.dropped.sum() for stats in measured.values()),
        "router_entropy": sum(stats.entropy.sum() for stats in measured.values()),
    }
    for replay in (stats.replay for stats in measured.values() if stats.replay is not None):
        sums |= {
            "replayed": replay.replayed.sum(),
            "replay_foreign": replay.foreign.sum(),
            "replay_filtered": replay.filtered.sum(),
        }
    return sums


def _shift_right_by(array: jax.Array, k: int) -> jax.Array:
    """Shifts a row k positions to the right; zeros come in."""
    for _ in range(k):
        array = context.shift_right(array)
    return array


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Importance-weighted policy gradient with a trust region on the ratio to the sampler's probabilities, with a KL to
    a reference in its advantages, plus cross-entropy and the KL to a teacher.

    L = - 1/Z_pg sum_t sg[f(r_t, a_t) a_t] log p(x_t) - 1/Z_ce sum_t c_t log p(x_t)
        + 1/Z_fb sum_n v_n KL(q_n || p_n)
    a_t = w_t A_t - k_t Z_pg/Z_kl (log p(x_t) - log p_ref(x_t))

    r_t = p(x_t) / p_sampler(x_t) is the importance ratio, f is the trust region (train/trust_region.py); Z_pg is a
    constant of the batch as in Dr. GRPO (arXiv 2503.20783). The advantages A and the weights w (`weights`), c
    (`ce_weights`) and k (`kl_weights`) come with the batch (rl/algorithm.py). The KL is in the advantage, because as a
    term of its own its estimator k1 has an expected gradient of zero (rl/reference.py). The third term is there where
    the batch has teachers q_n of some outputs p_n, with weights v (train/teacher_kl.py).
    """

    config: PolicyLossConfig = dataclasses.field(default_factory=PolicyLossConfig)

    def trains(self, name: str) -> bool:
        """Returns whether the loss trains a subtree of params; it leaves out the MTP modules."""
        return name != "mtp"

    def __call__(self, decoder: Decoder, batch: Batch, normalisers: Normalisers) -> LossOutput:
        hidden = hidden_states(decoder, batch, plausibility=self.config.replay_plausibility)

        def at_position(main: Predictions, token: jax.Array):
            return main.logprob(token), jax.lax.stop_gradient(main.entropy())

        tokens_BS, chunk = context.shift_left(batch["tokens"]), decoder.config.head_chunk
        logprobs_BS, entropy_BS = predict_positions(decoder, at_position, chunk, (hidden.last_BSD,), tokens_BS)
        z = normalisers if isinstance(normalisers, LossTermNormalisers) else LossTermNormalisers(*4 * (normalisers,))
        policy, sums, maxima = self._policy_gradient(logprobs_BS, entropy_BS, batch, z)
        ce_weights_BS = _at_output(batch, "ce_weights")
        sums["cross_entropy"] = -(ce_weights_BS * logprobs_BS).sum()
        sums["ce_weight"] = ce_weights_BS.sum()
        loss = policy / z.policy + sums["cross_entropy"] / z.cross_entropy
        if "teacher_states" in batch:
            term, kl_sums = teacher_kl(decoder, hidden.last_BSD, batch)
            loss = loss + term / z.feedback
            sums |= kl_sums
        sums |= router_sums({"moe_layers": hidden.router_stats})
        return LossOutput(loss, sums, maxima | logit_maxima(hidden.max_logits))

    def _policy_gradient(
        self, logprobs_BS: jax.Array, entropy_BS: jax.Array, batch: Batch, normalisers: LossTermNormalisers
    ) -> tuple[jax.Array, dict, dict]:
        """Returns the sum of the policy gradient before it is divided, and its metrics: sums and maxima."""
        frozen_BS = jax.lax.stop_gradient(logprobs_BS)
        weights_BS, kl_weights_BS = _at_output(batch, "weights"), _at_output(batch, "kl_weights")
        sampled = weights_BS > 0
        advantages_BS = weights_BS * _at_output(batch, "advantages")
        reference_sums = {}
        if "reference_logprobs" in batch:
            k1_BS = frozen_BS - _at_output(batch, "reference_logprobs")
            advantages_BS -= normalisers.policy / normalisers.kl * kl_weights_BS * k1_BS
            sampled |= kl_weights_BS != 0
            reference_sums = {
                "reference_k1": jnp.where(sampled, k1_BS, 0).sum(),
                "reference_k3": jnp.where(sampled, jnp.expm1(-k1_BS) + k1_BS, 0).sum(),
            }
        log_ratio = jnp.where(sampled, frozen_BS - _at_output(batch, "sampler_logprobs"), 0.0)
        ratio = jnp.exp(log_ratio)
        region = resolve(self.config.trust_region, TRUST_REGIONS, "loss.trust_region")
        bounds = Bounds(1 - self.config.ratio_low, 1 + self.config.ratio_high, self.config.dual_clip)
        trusted_BS = region(ratio, advantages_BS, bounds)
        dual_clipped = sampled & (advantages_BS < 0) & (ratio > bounds.dual) & (trusted_BS == 0)
        sums = {
            "tokens": sampled.sum().astype(jnp.float32),
            "entropy": (entropy_BS * sampled).sum(),
            "out_of_region": (sampled & (trusted_BS != ratio)).sum().astype(jnp.float32),
            "dual_clipped": dual_clipped.sum().astype(jnp.float32),
            "sampler_kl": -log_ratio.sum(),
        }
        sums |= reference_sums
        # A ratio may overflow where the advantage is zero.
        terms_BS = jnp.where(advantages_BS == 0, 0, trusted_BS * advantages_BS)
        loss = -(terms_BS * logprobs_BS).sum()
        return loss, sums, {"log_ratio": jnp.abs(log_ratio).max()}


def _at_output(batch: Batch, name: str) -> jax.Array:
    """Returns a float field [B,S] of a batch at the outputs that it belongs to; zeros where the batch lacks it."""
    return context.shift_left(batch[name]) if name in batch else jnp.zeros(batch["tokens"].shape, jnp.float32)


LOSSES: Mapping[str, Callable[[Any], Loss]] = {"language": LanguageLoss, "policy_gradient": PolicyLoss}
"""Builders by the name in a loss's config."""
