"""Baselines of sessions without siblings: what a return is compared with, known before the answer.

"shrinkage", for session i of a user with n other sessions s, whose mean returns are r_s:

    b_i = mu_i + sum_s (r_s - mu_s) / (n + kappa)

with mu the means of the sessions' buckets (of all sessions, where a bucket has fewer than 20 users), all of them
without session i, and kappa = within / between, the variances of a session within its user and of users, by the method
of moments (analysis of variance of unequal groups) on deviations from the bucket's mean. In one bucket this is
(sum_s r_s + kappa mu) / (n + kappa). Without a difference between users b_i = mu_i.

"ridge": a linear regression of returns on features (features.py), fitted on the users of four folds and applied to
those of the fifth, so that no answer has a part in its own baseline. Each session has the weight 1, over its answers.

Both leave the mean of the policy gradient as it is, since a baseline does not depend on the answer. Their worth is the
part of the variance that they take away. All are arrays of N sessions or A answers; the state is O(A) numbers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from composer_jax.errors import UserError
from composer_jax.realtime.labels.reward import BUCKET_USERS

FOLDS = 5
RIDGE = 1.0
"""Of the squared norm of the coefficients of standardised features, beside a sum over sessions."""


@dataclasses.dataclass(frozen=True)
class SessionFacts:
    """What baselines know of N sessions."""

    users: Sequence[str]
    buckets: Sequence[str]
    opened: np.ndarray
    """Unix seconds, [N]."""
    due: np.ndarray
    """Unix seconds at which what became of a session was known: its last edit and the horizon, [N]."""


def mean_by_session(returns: np.ndarray, session: np.ndarray, count: int) -> np.ndarray:
    """Returns the mean of the returns of each session, [N].

    returns, session: of each answer, [A]; every one of the `count` sessions has an answer.
    """
    return np.bincount(session, returns, count) / np.bincount(session, minlength=count)


def variance_ratio(values: np.ndarray, users: Sequence[str]) -> float:
    """Returns kappa = within / between of sessions by user, by the method of moments; inf without a difference.

    It is inf, too, where no user has two sessions, or there is one user: nothing says then what users are worth.
    """
    number = _numbers(users)
    counts = np.bincount(number)
    n, k = len(values), len(counts)
    if k < 2 or n == k:
        return float("inf")
    means = np.bincount(number, values) / counts
    within = ((values - means[number]) ** 2).sum() / (n - k)
    between_square = (counts * (means - values.mean()) ** 2).sum() / (k - 1)
    between = (between_square - within) / ((n - (counts**2).sum() / n) / (k - 1))
    return float(within / between) if between > 0 else float("inf")


@dataclasses.dataclass(frozen=True)
class _Buckets:
    """Means of N sessions by bucket; a bucket with few users has the mean of all."""

    number: np.ndarray
    """Of each session, [N]; -1 in a bucket with few users."""
    full: np.ndarray
    """The mean of each bucket."""
    without: np.ndarray
    """mu_i, [N]: without the session itself."""
    all_without: np.ndarray
    """The mean of all sessions without this one, [N]."""

    @classmethod
    def of(cls, values: np.ndarray, buckets: Sequence[str], users: Sequence[str]) -> Self:
        n = len(values)
        if n < 2:
            raise UserError(f"a batch of {n} sessions has no baseline; wait for two or more.")
        bucket, user = _numbers(buckets), _numbers(users)
        pairs = np.unique(np.stack([bucket, user]), axis=1)
        is_large = np.bincount(pairs[0], minlength=bucket.max() + 1) >= BUCKET_USERS
        sums, counts = np.bincount(bucket, values), np.bincount(bucket)
        all_without = (values.sum() - values) / (n - 1)
        of_bucket = (sums[bucket] - values) / np.maximum(counts[bucket] - 1, 1)
        without = np.where(is_large[bucket], of_bucket, all_without)
        return cls(np.where(is_large[bucket], bucket, -1), sums / counts, without, all_without)

    def sum_of_others(self, user: np.ndarray) -> np.ndarray:
        """Returns, [N], the sum of the means of the user's other sessions, all of them without session i."""
        size = len(self.full) + 1
        pair = user * size + self.number + 1  # the sessions of a user in a bucket; the first is of small buckets
        counts = np.bincount(pair, minlength=(user.max() + 1) * size).reshape(-1, size)
        of_user = (counts[:, 1:] @ self.full)[user]
        is_large, own = self.number >= 0, counts[user, self.number + 1]
        small = counts[user, 0] - ~is_large
        same = np.where(is_large, (own - 1) * self.without - own * self.full[self.number], 0.0)
        return of_user + same + small * self.all_without


def shrinkage(values: np.ndarray, facts: SessionFacts) -> tuple[np.ndarray, float]:
    """Returns (b_i of each session, [N], kappa).

    Raises UserError for fewer than two sessions.

    values: mean return of each session, [N].
    """
    buckets = _Buckets.of(values, facts.buckets, facts.users)
    kappa = variance_ratio(values - buckets.without, facts.users)
    if np.isinf(kappa):
        return buckets.without, kappa
    user = _numbers(facts.users)
    others = np.bincount(user)[user] - 1
    deviations = np.bincount(user, values)[user] - values - buckets.sum_of_others(user)
    return buckets.without + deviations / np.maximum(others + kappa, 1e-300), kappa


def earlier_means(values: np.ndarray, facts: SessionFacts) -> np.ndarray:
    """Returns the feature `user_mean` of each session, [N]: the sum of n terms r_s - mu_s over n + kappa.

    The n sessions are those of the user whose outcome was known before the session opened. Without a difference between
    users it is 0.
    """
    centred, out = values - _Buckets.of(values, facts.buckets, facts.users).without, np.zeros(len(values))
    kappa = variance_ratio(centred, facts.users)
    if np.isinf(kappa):
        return out
    number = _numbers(facts.users)
    for own in _members(number):
        by_due = own[np.argsort(facts.due[own], kind="stable")]
        sums = np.concatenate([[0.0], np.cumsum(centred[by_due])])
        known = np.searchsorted(facts.due[by_due], facts.opened[own], side="right")
        out[own] = sums[known] / np.maximum(known + kappa, 1e-300)
    return out


def ridge(returns: np.ndarray, columns: np.ndarray, session: np.ndarray, facts: SessionFacts) -> np.ndarray:
    """Returns the prediction for each answer, [A], by a regression on the answers of other folds' users.

    Args:
      returns: [A]. columns: features, [A, P]. session: of each answer, [A].

    Raises UserError for sessions of one user, and for features that are not finite.
    """
    if not np.isfinite(columns).all():
        raise UserError("a feature of traffic.batch.features is not finite; return finite numbers.")
    user = _numbers(facts.users)
    if (count := int(user.max()) + 1) < 2:
        raise UserError('baseline="ridge" compares users, and the batch has one; use baseline="shrinkage".')
    # By the order of names, so that folds have equally many users, whatever the sessions' order.
    rank = np.argsort(np.argsort(list(dict.fromkeys(facts.users)), kind="stable"), kind="stable")
    fold = (rank % min(FOLDS, count))[user[session]]
    weights = 1.0 / np.bincount(session)[session]
    predictions = np.empty(len(returns))
    for one in range(min(FOLDS, count)):
        train, test = fold != one, fold == one
        predictions[test] = _fit(columns[train], returns[train], weights[train])(columns[test])
    return predictions


def _fit(columns: np.ndarray, returns: np.ndarray, weights: np.ndarray):
    """Returns the function columns -> predictions that minimises sum w (r - a - x b)^2 + RIDGE |b|^2.

    x are the columns minus their means, in their standard deviations; a column without one predicts nothing.
    """
    total = weights.sum()
    mean, middle = weights @ columns / total, weights @ returns / total
    deviation = np.sqrt(weights @ (columns - mean) ** 2 / total)
    scale = np.where(deviation > 1e-9 * np.maximum(1.0, np.abs(mean)), deviation, np.inf)
    x = (columns - mean) / scale
    normal = (x * weights[:, None]).T @ x + RIDGE * np.eye(x.shape[1])
    coefficients = np.linalg.solve(normal, (x * weights[:, None]).T @ (returns - middle))
    return lambda others: middle + (others - mean) / scale @ coefficients


def standardised(residuals: np.ndarray) -> np.ndarray:
    """Returns residuals in standard deviations of the whole batch; zeros where all are equal.

    Never by user: a user of whom all sessions are alike would get noise of the size of a signal.
    """
    deviation = float(residuals.std())
    if deviation <= 1e-12 * max(1.0, float(np.abs(residuals).max(initial=0.0))):
        return np.zeros_like(residuals)
    return residuals / deviation


def explained_variance(returns: np.ndarray, baseline: np.ndarray) -> float | None:
    """Returns 1 - var(returns - baseline) / var(returns); None where the returns are all equal."""
    variance = float(returns.var())
    return None if variance == 0 else 1 - float((returns - baseline).var()) / variance


def _numbers(names: Sequence[str]) -> np.ndarray:
    """Returns the number of each name, int [N], in the order of their first occurrence."""
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return np.array([order[name] for name in names], int)


def _members(number: np.ndarray) -> list[np.ndarray]:
    """Returns the places of each number."""
    order = np.argsort(number, kind="stable")
    return np.split(order, np.cumsum(np.bincount(number))[:-1])
