"""Caps: no user, repository or organisation has more than its share of what a batch trains.

A session i has T_i trained tokens and a weight w_i from 0 to 1, a factor on its advantages. The weights are those of
progressive filling (max-min fairness): all u_i rise together from 0; where a group g with the cap c has sum_g u_i T_i =
c, its sessions stay where they are; at the level t at which sum u_i T_i = 1 everything stops, and w_i = u_i / t. With W
= 1 / t weighted tokens in all,

    sum_g w_i T_i <= c W for every group of every kind, and w_i < 1 only in a group that is at its cap exactly

so no weight can be raised, and of the users alone no other weights leave more tokens. Without a group that is too large
all weights are 1. If all sessions stop before the sum is 1, no weights keep the caps.

What one organisation o can do is bounded. With advantages of at most L standard deviations,

    sum over o of |w A| tokens  <=  L c_o W,    and its share of the batch's sum  <=  L c_o / mean |A|

where the mean is over the weighted tokens. Without caps the first would be L times its traffic.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from composer_jax.errors import UserError

LEAST_PART = 0.1
"""Caps that leave less than this part of the trained tokens are refused."""
TOLERANCE = 1e-12
"""Groups whose levels differ by less, relatively, are full at the same time."""
STEP = 1e-3
"""A cap that would work is named in multiples of this."""


@dataclasses.dataclass(frozen=True)
class Cap:
    """One kind of cap."""

    name: str
    """The field of BatchRules."""
    share: float
    """c, above 0; 1 and more caps nothing."""
    groups: np.ndarray
    """int [sessions]: the group of each session, from 0; -1 for a session that is in none."""

    @classmethod
    def of(cls, name: str, share: float, names: Sequence[str]) -> "Cap":
        """Returns the cap of groups by name; sessions with the name "" are in none."""
        numbers = {one: i for i, one in enumerate(dict.fromkeys(one for one in names if one))}
        return cls(name, share, np.array([numbers.get(one, -1) for one in names], int))

    def totals(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the sum of [sessions] over each group."""
        inside = self.groups >= 0
        return np.bincount(self.groups[inside], tokens[inside], minlength=int(self.groups.max(initial=-1)) + 1)


def cap_weights(tokens: np.ndarray, caps: Sequence[Cap]) -> np.ndarray:
    """Returns the weight of each session, float64 [sessions] from 0 to 1.

    Raises UserError for caps that leave less than LEAST_PART of the tokens, with caps that would work.

    tokens: trained tokens of each session, [sessions].
    """
    tokens = np.asarray(tokens, np.float64)
    weights = _solve(tokens, caps)
    if tokens.sum() > 0 and weights @ tokens < LEAST_PART * tokens.sum():
        left = weights @ tokens / tokens.sum()
        working = "; ".join(
            f"{old.name}={new.share:g} in place of {old.share:g} ({len(old.totals(tokens))} share all sessions)"
            for old, new in zip(caps, _working(tokens, caps), strict=True)
            if new.share != old.share
        )
        raise UserError(
            f"the caps leave {left:.0%} of the trained tokens, and must leave {LEAST_PART:.0%}; wait for sessions of "
            f"others, or use {working}; these are flags of launch.traffic batch and fields of traffic.batch."
        )
    return weights


def largest_shares(tokens: np.ndarray, weights: np.ndarray, caps: Sequence[Cap]) -> Mapping[str, float]:
    """Returns the cap's name -> the largest share of a group in the weighted tokens; 0 without groups."""
    weighted = weights * tokens
    return {cap.name: float(cap.totals(weighted).max(initial=0.0) / max(weighted.sum(), 1e-300)) for cap in caps}


def effective_sample_size(tokens: np.ndarray, weights: np.ndarray, users: Sequence[str]) -> float:
    """Returns (sum w)^2 / sum w^2, where w are the weighted tokens of each user."""
    by_user = Cap.of("", 1.0, users).totals(weights * tokens)
    return float(by_user.sum() ** 2 / max((by_user**2).sum(), 1e-300))


def _solve(tokens: np.ndarray, caps: Sequence[Cap]) -> np.ndarray:
    """Progressive filling; zeros where no weights keep the caps. At most 1 / share groups of a kind are ever full."""
    limiting = [cap for cap in caps if cap.share < 1]
    levels = np.full(len(tokens), np.inf)
    while True:
        rising = np.where(np.isinf(levels), tokens, 0.0)
        stopped = np.where(np.isinf(levels), 0.0, tokens * np.where(np.isinf(levels), 0.0, levels))
        if rising.sum() <= 0:
            return np.zeros(len(tokens))
        level = (1 - stopped.sum()) / rising.sum()
        full = [_full_at(cap, rising, stopped) for cap in limiting]
        first = min((at.min(initial=np.inf) for at in full), default=np.inf)
        if level <= first * (1 + TOLERANCE):  # equal but for rounding where 1 / share groups have all sessions
            return np.minimum(1.0, levels / level)
        for cap, at in zip(limiting, full, strict=True):
            is_full = np.append(at <= first * (1 + TOLERANCE), False)  # the last one is of sessions in no group
            levels = np.where(is_full[cap.groups] & np.isinf(levels), first, levels)


def _full_at(cap: Cap, rising: np.ndarray, stopped: np.ndarray) -> np.ndarray:
    """The level at which each group reaches its cap; inf for one whose sessions have all stopped."""
    totals = cap.totals(rising)
    return np.where(totals > 0, (cap.share - cap.totals(stopped)) / np.where(totals > 0, totals, 1.0), np.inf)


def _working(tokens: np.ndarray, caps: Sequence[Cap]) -> list[Cap]:
    """Returns caps that leave enough: each in turn is raised as little as it takes, the later ones at 1."""
    chosen: list[Cap] = []
    for cap in caps:
        low, high = int(cap.share / STEP), round(1 / STEP)
        if _is_enough(tokens, [*chosen, cap]):
            chosen.append(cap)
            continue
        while high - low > 1:
            middle = (low + high) // 2
            works = _is_enough(tokens, [*chosen, dataclasses.replace(cap, share=middle * STEP)])
            low, high = (low, middle) if works else (middle, high)
        chosen.append(dataclasses.replace(cap, share=round(high * STEP, 6)))
    return chosen


def _is_enough(tokens: np.ndarray, caps: Sequence[Cap]) -> bool:
    return bool(_solve(tokens, caps) @ tokens >= LEAST_PART * tokens.sum())
