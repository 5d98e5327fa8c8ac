"""Baselines of sessions without siblings: what a return is compared with, known before the answer.

"shrinkage", for session i of user u, whose n_u - 1 other sessions have the mean returns r_s:

    b_i = (sum_s r_s + kappa mu_i) / (n_u - 1 + kappa)

with mu_i the mean of the other sessions of its bucket (of all, where the bucket has fewer than 20 users), and kappa =
within / between, the variances of a session within its user and of users, by the method of moments (analysis of
variance of unequal groups) on deviations from the bucket's mean. Without a difference between users b_i = mu_i.

"ridge": a linear regression of returns on features (features.py), fitted on the users of four folds and applied to
those of the fifth, so that no answer has a part in its own baseline. Each session has the weight 1, over its answers.

Both leave the mean of the policy gradient as it is, since a baseline does not depend on the answer. Their worth is the
part of the variance that they take away. All are arrays of N sessions or A answers; the state is O(A) numbers.
"""

import dataclasses
from collections.abc import Sequence

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


def bucket_means(values: np.ndarray, buckets: Sequence[str], users: Sequence[str]) -> np.ndarray:
    """Returns mu_i, [N]: the mean of the other sessions of the bucket, or of all where it has few users.

    Raises UserError for fewer than two sessions.
    """
    n = len(values)
    if n < 2:
        raise UserError(f"a batch of {n} sessions has no baseline; wait for two or more.")
    bucket, user = _numbers(buckets), _numbers(users)
    pairs = np.unique(np.stack([bucket, user]), axis=1)
    is_large = np.bincount(pairs[0], minlength=bucket.max() + 1) >= BUCKET_USERS
    sums, counts = np.bincount(bucket, values), np.bincount(bucket)
    of_bucket = (sums[bucket] - values) / np.maximum(counts[bucket] - 1, 1)
    return np.where(is_large[bucket], of_bucket, (values.sum() - values) / (n - 1))


def shrinkage(values: np.ndarray, facts: SessionFacts) -> tuple[np.ndarray, float]:
    """Returns (b_i of each session, [N], kappa).

    values: mean return of each session, [N].
    """
    means = bucket_means(values, facts.buckets, facts.users)
    kappa = variance_ratio(values - means, facts.users)
    if np.isinf(kappa):
        return means, kappa
    number = _numbers(facts.users)
    others = np.bincount(number)[number] - 1
    sums = np.bincount(number, values)[number] - values
    return (sums + kappa * means) / np.maximum(others + kappa, 1e-300), kappa


def earlier_means(values: np.ndarray, facts: SessionFacts) -> np.ndarray:
    """Returns the feature `user_mean` of each session, [N]: sum of n (r_s - mean of all) / (n + kappa).

    The n sessions are those of the user whose outcome was known before the session opened. Without a difference between
    users it is 0.
    """
    kappa = variance_ratio(values, facts.users)
    out, centred = np.zeros(len(values)), values - values.mean()
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


def standardised(residuals: np.ndarray, limit: float) -> np.ndarray:
    """Returns residuals in standard deviations of the whole batch, clipped; zeros where all are equal.

    Never by user: a user of whom all sessions are alike would get noise of the size of a signal.
    """
    deviation = float(residuals.std())
    if deviation <= 1e-12 * max(1.0, float(np.abs(residuals).max(initial=0.0))):
        return np.zeros_like(residuals)
    return np.clip(residuals / deviation, -limit, limit)


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
