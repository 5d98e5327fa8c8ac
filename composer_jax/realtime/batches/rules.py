"""BatchRules: how a batch of users' sessions is made."""

import dataclasses
import math
from typing import Literal, get_args

from composer_jax.errors import UserError
from composer_jax.realtime.batches.features import FEATURES, check_features
from composer_jax.realtime.labels.reward import RewardWeights

Baseline = Literal["shrinkage", "ridge"]


@dataclasses.dataclass(frozen=True)
class BatchRules:
    """How labelled sessions become a batch. Numbers are ours (not published) unless a source stands beside.

    Raises UserError for a value out of range, and for a feature that the answer causes.
    """

    min_sessions: int = 256
    """A batch waits until so many sessions can be trained; a mean difference of 0.02 whose standard deviation is 0.6
    takes 7,056 of them (1.96 + 0.84 standard errors)."""
    horizon_s: float = 3600.0
    """Age of the labels in seconds; a batch has labels of one age only."""
    lag: int = 1
    """Versions before the serving one whose answers are trained, too; answers of older ones are dropped."""
    baseline: Baseline = "shrinkage"
    """What is taken off a return (baselines.py): "shrinkage", the mean of the user's other sessions shrunk towards that
    of the bucket, or "ridge", a regression on `features` whose folds have different users."""
    features: tuple[str, ...] = tuple(FEATURES)
    """Features of "ridge": names of batches.features.FEATURES, or import paths of such functions."""
    cap_user: float = 0.01
    """Largest share of one user in the batch's trained tokens, after weighting."""
    cap_repository: float = 0.02
    """The same of one repository; sessions that name none share no cap."""
    cap_organisation: float = 0.2
    """The same of one organisation; sessions of none share no cap."""
    gamma: float = 1.0
    """Factor on the session's terms for every answer between an answer and the last one."""
    advantage_limit: float = 3.0
    """Advantages are clipped to so many standard deviations of the batch."""
    weights: RewardWeights = dataclasses.field(default_factory=RewardWeights)
    """The factor of each signal in the return."""

    def __post_init__(self) -> None:
        if self.min_sessions < 2:
            raise UserError(f"traffic.batch.min_sessions={self.min_sessions}; a baseline needs 2 sessions or more.")
        if not (math.isfinite(self.horizon_s) and self.horizon_s > 0):
            raise UserError(f"traffic.batch.horizon_s={self.horizon_s} is out of range; use seconds above 0.")
        if self.lag < 0:
            raise UserError(f"traffic.batch.lag={self.lag} is negative; 0 trains answers of the serving version only.")
        if self.baseline not in get_args(Baseline):
            raise UserError(
                f"traffic.batch.baseline={self.baseline!r} is unknown; use one of {', '.join(get_args(Baseline))}."
            )
        for name in ("cap_user", "cap_repository", "cap_organisation"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(
                    f"traffic.batch.{name}={getattr(self, name)} is not a share above 0; 1 switches this cap off."
                )
        if not 0 <= self.gamma <= 1:
            raise UserError(f"traffic.batch.gamma={self.gamma} is not between 0 and 1.")
        if not (math.isfinite(self.advantage_limit) and self.advantage_limit > 0):
            raise UserError(
                f"traffic.batch.advantage_limit={self.advantage_limit} is out of range; use a finite number above 0."
            )
        check_features(self.features)
