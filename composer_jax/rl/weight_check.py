"""The weight check of RL: a fixed row of tokens that the sampler and the learner score with the same weights.

Checksums (sampler/weight_checksums.py) say whether the bits of the weights arrived. The gap of the fixed row says
whether both sides compute the same policy with them: after a resumption, an update of a library, on another device.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.rl.config import RLConfig
from composer_jax.rl.policy_update import GroupLearner
from composer_jax.sampler.config import MOST_SCORED, SamplerConfig
from composer_jax.sampler.runner import RowScores
from composer_jax.seeds import hash_seed
from composer_jax.train.learner import TrainState

ROUNDING = {"int8": 2**-7, "mxfp8": 2**-4, "nvfp4": 2**-2}
"""Relative rounding error of formats that jnp.finfo lacks; of int8, relative to a typical number of a column."""
GROWTH = 4.0
"""Gap in nats over rounding error and square root of the number of layers. Networks with random weights had at most 3.2
(docs/design.md, "Weights that do not arrive")."""
GROWTH_OF_ROUTES = 2.0
"""How many times as large the gap is where sampler and learner choose experts by themselves. Measured: at most 2.8."""
LOGPROB_ROUNDING = 2**-19
"""Nats by which sums and log-probabilities in float32 are off, whatever else is rounded."""
MARGIN = 4.0
"""Default bound of the gap over the expected one."""
LEAST_BOUND = 0.05
"""Default bound in nats at least: GPUs and TPUs round the operands of float32 products to fewer digits."""


class RowScorer(Protocol):
    """A policy that scores rows with the weights that it serves."""

    def score(self, tokens: Sequence[int]) -> RowScores:
        """See Sampler.score."""
        ...


class WeightCheck:
    """Measures the gap of the fixed row, and refuses one beyond the bound."""

    def __init__(self, learner: GroupLearner, sampler: RowScorer, tokens: Sequence[int], bound: float) -> None:
        self._learner, self._sampler, self._tokens, self._bound = learner, sampler, tokens, bound

    async def measure(self, state: TrainState, version: int) -> float:
        """Returns the median over the row's tokens of |log p_learner - log p_sampler|, in nats.

        The learner uses the experts that the sampler chose, where rl.router_replay is on. The median, because without
        replay a router that chooses otherwise at a few tokens moves these by tenths of a nat and the others by nothing,
        while weights or a computation that differ move them all. Every batch shard of the sampler scores the row with
        the devices that it has; the largest of their gaps counts. Raises UserError if the gap is beyond the bound, or
        NaN.

        Args:
          state, version: what the sampler holds, which is paused.
        """
        scores = await asyncio.to_thread(self._sampler.score, self._tokens)
        logprobs_S = await asyncio.to_thread(self._learner.score, state, self._tokens, scores.routing)
        gap = float(np.median(np.abs(scores.logprobs_BS - logprobs_S[1:]), axis=1).max())
        if not gap <= self._bound:
            raise UserError(
                f"sampler and learner disagree although both hold version {version}: the median gap of a "
                f"fixed row of {len(self._tokens)} tokens is {gap:.3g} nats, beyond {self._bound:.3g}; run without "
                "sampler.param_dtype, sampler.mesh and model.cache_dtype to find which of them does it, or raise "
                "rl.weight_gap_bound."
            )
        return gap


def check_row(seed: int, model: ModelConfig, sampler: SamplerConfig, longest: int) -> list[int]:
    """Returns the fixed row: random token ids, a function of the run's seed and the vocabulary.

    longest: tokens that the learner scores at once.
    """
    n = min(MOST_SCORED, sampler.max_model_len, longest)
    rng = np.random.default_rng(hash_seed("weight check", seed))
    return rng.integers(0, model.vocab_size, n).tolist()


def expected_gap(rl: RLConfig, model: ModelConfig, sampler: SamplerConfig) -> float:
    """Returns the gap in nats that the dtypes of sampler and learner explain.

    Both round activations in every layer, independently of each other, so the differences grow with the square root of
    the number of layers. Numbers that only one side rounds (8-bit weights or cache) add to them, and so do experts that
    only one side chooses.
    """
    rounding = _rounding_error(model.compute_dtype)
    if model.precision != "none":
        rounding += _rounding_error(model.precision)
    if sampler.param_dtype not in ("", model.param_dtype):
        stored = _rounding_error(sampler.param_dtype)
        rounding += stored if stored > _rounding_error(model.compute_dtype) else 0.0
    if model.cache_dtype == "int8":
        rounding += _rounding_error("int8")
    if model.n_experts and rl.route_shape(model) is None:
        rounding *= GROWTH_OF_ROUTES
    return GROWTH * rounding * math.sqrt(model.n_layers) + LOGPROB_ROUNDING


def _rounding_error(name: str) -> float:
    """Returns the largest relative error of rounding to a dtype or format."""
    return ROUNDING[name] if name in ROUNDING else float(jnp.finfo(name).eps) / 2


def gap_bound(rl: RLConfig, model: ModelConfig, sampler: SamplerConfig) -> float:
    """Returns the bound of the gap in nats: rl.weight_gap_bound, or the default for the dtypes. Raises UserError for a
    bound below the expected gap."""
    expected = expected_gap(rl, model, sampler)
    if rl.weight_gap_bound is None:
        return max(MARGIN * expected, LEAST_BOUND)
    if not rl.weight_gap_bound >= expected:
        raise UserError(
            f"rl.weight_gap_bound={rl.weight_gap_bound} nats is below the gap that the dtypes explain, {expected:.2g} "
            f"(model.compute_dtype={model.compute_dtype!r}, sampler.param_dtype={sampler.param_dtype!r}, "
            f"{model.n_layers} layers); use {MARGIN * expected:.2g} or more, or leave it empty."
        )
    return rl.weight_gap_bound
