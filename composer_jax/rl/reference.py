"""The reference policy of RL, and the KL to it as a part of the advantage.

The KL is regularised by its estimator k1 = log p - log p_ref in the *reward* (Composer 2, arXiv 2603.24477, section
4.1, has k1 without saying where). As a term of the loss, k1 has an expected gradient of zero: E[grad log p] = 0. In the
reward its gradient is that of the KL:

    grad KL(p || p_ref) = E[sum_t grad log p(x_t) sum_{t' >= t} k1(x_t')]

The "sequence" form is this gradient. The "token" form keeps only the term t' = t, which has less variance and a bias:
a token does not pay for those that follow it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from composer_jax.errors import UserError
from composer_jax.models.model_def import Params
from composer_jax.rl.batch import BeforeCall, PackedRows, WeightedRow
from composer_jax.train.losses import LossTermNormalisers
from composer_jax.train.scoring import TokenScorer

FORMS = ("token", "sequence")


@dataclasses.dataclass(frozen=True)
class ReferenceKLConfig:
    """The KL to the policy that RL started from.

    Groups of equal rewards are not trained, and so they do not pay it. Raises UserError for a negative coefficient, or
    an unknown form.
    """

    coefficient: float = 0.0
    """beta, what one nat costs; 0 needs no reference. Not published (Composer 2 names neither it nor the reference)."""
    form: Literal["token", "sequence"] = "token"
    """What a token pays for: "token" its own k1, "sequence" those of all tokens of its episode from it on, which is the
    gradient of the KL and needs another forward pass."""

    def __post_init__(self) -> None:
        if not self.coefficient >= 0:
            raise UserError(f"rl.algorithm.kl.coefficient={self.coefficient} is negative; use 0 or more.")
        if self.form not in FORMS:
            raise UserError(f"rl.algorithm.kl.form={self.form!r} is unknown; use {' or '.join(FORMS)}.")


class Reference:
    """The reference's weights, which the caller must not donate, and the program that scores tokens with them."""

    def __init__(self, params: Params, router_bias: Params, scorer: TokenScorer, before_call: BeforeCall):
        """before_call: called with "reference_logprobs" or "policy_logprobs" and the batch that is scored.

        Raises UserError if the weights are not of the network that is trained."""
        expected = jax.tree.map(lambda a: a.shape, scorer.definition.shapes())
        shapes = jax.tree.map(lambda a: a.shape, (params, router_bias))
        if shapes != expected:
            raise UserError(
                f"The reference has {_difference(shapes, expected)}; use weights of the network that is trained."
            )
        self.params, self.router_bias, self.scorer, self._before_call = params, router_bias, scorer, before_call

    def logprobs(self, batch: dict[str, Any]) -> np.ndarray:
        """Returns log p_ref of the tokens of a batch that are sampled or pay for the KL, float32 [B,S]; 0 elsewhere.

        The reference chooses its own experts, because those of the policy are a part of what has moved.
        """
        own = {name: array for name, array in batch.items() if name != "routes"}
        self._before_call("reference_logprobs", own)
        logprobs_BS = self.scorer(self.params, self.router_bias, own)
        return np.where((batch["weights"] != 0) | (batch["kl_weights"] != 0), logprobs_BS, np.float32(0))

    def policy_logprobs(self, policy: tuple[Params, Params], batch: dict[str, Any]) -> np.ndarray:
        """Returns log p of the tokens of a batch by the weights before the step, float32 [B,S]."""
        self._before_call("policy_logprobs", batch)
        return self.scorer(*policy, batch)


def _difference(shapes, expected) -> str:

    def is_shape(x) -> bool:
        return isinstance(x, tuple) and all(isinstance(n, int) for n in x)

    actual, wanted = (
        {jax.tree_util.keystr(path[1:]): shape for path, shape in jax.tree.leaves_with_path(tree, is_leaf=is_shape)}
        for tree in (shapes, expected)
    )
    name = next(name for name in sorted(actual.keys() | wanted.keys()) if actual.get(name) != wanted.get(name))
    return f"a weight {name} of shape {actual.get(name)}, the network {wanted.get(name)}"


def with_reference(
    packed: PackedRows,
    config: ReferenceKLConfig,
    reference: Reference,
    policy: tuple[Params, Params],
    normalisers: LossTermNormalisers,
) -> list[dict[str, Any]]:
    """Returns the batches with the reference's log-probabilities and, in the sequence form, the KL in the advantages.

    policy: (params, router_bias) before the step, whose k1 the sequence form charges.
    """
    batches = [
        batch
        | {
            "kl_weights": np.float32(config.coefficient) * batch["kl_weights"],
            "reference_logprobs": reference.logprobs(batch),
        }
        for batch in packed.batches
    ]
    if config.form == "token":
        return batches  # the loss knows log p
    costs = [b["kl_weights"] * (reference.policy_logprobs(policy, b) - b["reference_logprobs"]) for b in batches]
    to_go = packed.place(sum_later_tokens(packed.rows, packed.read(costs)), np.float32)
    scale = np.float32(normalisers.policy / normalisers.kl)
    return [_charged(batch, scale * to_go_BS) for batch, to_go_BS in zip(batches, to_go, strict=True)]


def _charged(batch: dict[str, Any], cost_BS: np.ndarray) -> dict[str, Any]:
    """Returns the batch with the cost of every token in its advantage, so that the loss adds none."""
    pays, sampled = batch["kl_weights"] != 0, batch["weights"] != 0
    advantages_BS = batch["weights"] * batch["advantages"] - np.where(pays, cost_BS, np.float32(0))
    weights_BS = (pays | sampled).astype(np.float32)
    return batch | {"weights": weights_BS, "advantages": advantages_BS, "kl_weights": np.zeros_like(cost_BS)}


def sum_later_tokens(rows: Sequence[WeightedRow], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns for each token the sum of the values from it to the end of its episode, float64 [n] for each row.

    Args:
      rows: those of an episode follow each other, in the order of its segments.
      values: of each row, [n].
    """
    later: dict[int, float] = {}
    sums = []
    for row, values_n in zip(reversed(rows), reversed(values), strict=True):
        sum_n = np.cumsum(values_n[::-1], dtype=np.float64)[::-1] + later.get(row.episode, 0.0)
        later[row.episode] = float(sum_n[0])
        sums.append(sum_n)
    return sums[::-1]
