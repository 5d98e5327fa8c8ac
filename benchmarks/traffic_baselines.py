"""How much of the variance of returns a baseline takes away, on scripted users whose conditional mean is known.

    python -m benchmarks.traffic_baselines

A session's return is the kept share of its edit: 0 if the user rejects it, else a share near 1. The chance that the
user keeps it depends on the user, the kind and size of the request, the hour, and on one choice of the policy. The
conditional mean m given what is known before the answer is in closed form. Everything has a fixed seed.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable

import numpy as np

from composer_jax.realtime.batches.baselines import SessionFacts, earlier_means, ridge, shrinkage
from composer_jax.realtime.batches.features import KINDS, AnswerFacts, resolve_features
from composer_jax.realtime.batches.rules import BatchRules
from composer_jax.realtime.labels.reward import SIZES

SEEDS, SESSIONS, USERS = 20, 10_000, 200
CHOICE_RATE = 0.3
"""How often the policy does what helps."""
KEPT = 0.9
"""Mean kept share of an edit that is not rejected."""


@dataclasses.dataclass(frozen=True)
class ScriptedReturns:
    """N sessions of one answer."""

    facts: SessionFacts
    columns: np.ndarray
    """The features of BatchRules without `user_mean`, [N, P]."""
    returns: np.ndarray
    """[N]"""
    mean: np.ndarray
    """E[return | what is known before the answer], [N]."""
    score: np.ndarray
    """d log p(choice) / d logit of the choice, [N]: what an advantage is multiplied by."""


def scripted_returns(seed: int, sessions: int = SESSIONS, users: int = USERS) -> ScriptedReturns:
    """Returns a batch in which some users have many sessions, as SimulatedCycle draws them."""
    rng = np.random.default_rng(seed)
    activity = rng.gamma(0.7, size=users)
    user = rng.choice(users, sessions, p=activity / activity.sum())
    kind = rng.choice(len(KINDS), sessions, p=(0.6, 0.3, 0.1))
    prompt = np.exp(rng.normal(8.5, 1.2, sessions)).astype(int)
    opened = np.sort(rng.uniform(0, 5 * 86_400.0, sessions))
    hour = np.sin(2 * np.pi * opened / 86_400.0)
    logit = 1.2 * rng.standard_normal(users)[user] + np.array([0.0, 0.8, -0.8])[kind] - 0.3 * (np.log(prompt) - 8.5)
    choice = rng.random(sessions) < CHOICE_RATE
    chances = np.stack([1 / (1 + np.exp(-(logit + 0.2 * hour + helps))) for helps in (0.0, 1.0)])
    kept = rng.random(sessions) < np.where(choice, chances[1], chances[0])
    returns = kept * rng.beta(9 * KEPT, 9 * (1 - KEPT), sessions)
    sizes = [next((name for limit, name in SIZES if tokens <= limit), "large") for tokens in prompt.tolist()]
    buckets = [f"{KINDS[k]}/{size}" for k, size in zip(kind, sizes, strict=True)]
    facts = SessionFacts([f"u{i}" for i in user], buckets, opened, opened + 3700.0)
    names = [name for name in BatchRules().features if name != "user_mean"]
    features = resolve_features(names)
    known = (
        AnswerFacts(bucket, 200, tokens, 0, time, 0.0)
        for bucket, tokens, time in zip(buckets, prompt.tolist(), opened.tolist(), strict=True)
    )
    columns = np.array([[value for feature in features for value in feature(one)] for one in known])
    mean = KEPT * (CHOICE_RATE * chances[1] + (1 - CHOICE_RATE) * chances[0])
    return ScriptedReturns(facts, columns, returns, mean, choice - CHOICE_RATE)


def baselines_of(batch: ScriptedReturns) -> dict[str, np.ndarray]:
    """Returns the baseline of every session, by the name of BatchRules.baseline."""
    columns = np.column_stack([batch.columns, earlier_means(batch.returns, batch.facts)])
    return {
        "shrinkage": shrinkage(batch.returns, batch.facts)[0],
        "ridge": ridge(batch.returns, columns, np.arange(len(batch.returns)), batch.facts),
    }


def removed_part(batch: ScriptedReturns, baseline: np.ndarray) -> float:
    """Returns the variance that a baseline takes away over that which the conditional mean takes away."""
    variance = batch.returns.var()
    return float((variance - (batch.returns - baseline).var()) / (variance - (batch.returns - batch.mean).var()))


def measure(seeds: int = SEEDS) -> dict[str, float]:
    """Returns the numbers of the page.

    shrinkage_removes, ridge_removes    removed_part, the smallest of the seeds
    true_removes                        part of the variance that the conditional mean takes away, mean over the seeds
    gradient_z                          of the policy gradient with a baseline minus that with the conditional mean, in
                                        standard errors over the seeds: the larger one of the two baselines
    """
    removed: dict[str, list[float]] = {"shrinkage": [], "ridge": []}
    gradient: dict[str, list[float]] = {"shrinkage": [], "ridge": []}
    true: list[float] = []
    for seed in range(seeds):
        batch = scripted_returns(seed)
        true.append(1 - float((batch.returns - batch.mean).var() / batch.returns.var()))
        for name, baseline in baselines_of(batch).items():
            removed[name].append(removed_part(batch, baseline))
            gradient[name].append(float(((batch.mean - baseline) * batch.score).mean()))
    errors = [statistics.fmean(one) / (statistics.stdev(one) / seeds**0.5) for one in gradient.values()]
    return {
        **{f"{name}_removes": round(min(values), 3) for name, values in removed.items()},
        "true_removes": round(statistics.fmean(true), 3),
        "gradient_z": round(max(errors, key=abs), 2),
    }


def main(report: Callable[[str], None] = print) -> None:
    report(json.dumps(measure()))


if __name__ == "__main__":
    main()
