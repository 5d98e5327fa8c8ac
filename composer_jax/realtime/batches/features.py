"""What is known before an answer, as features of the regression that predicts what the answer will be worth.

Numbers that the answer causes are refused: a baseline that knows them takes away the effect that is to be learned.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from composer_jax.errors import UserError
from composer_jax.extensions import resolve
from composer_jax.realtime.labels.signal_table import SIGNALS

PLACE = "traffic.batch.features"
KINDS = ("change", "question", "other")
"""Kinds of a session's request that have a column; an unknown one has zeros (labels/conversation.py: request_kind)."""
DAY_S = 86_400.0


@dataclasses.dataclass(frozen=True)
class AnswerFacts:
    """What is known when an answer begins."""

    bucket: str
    """Kind of the session's request and size of its first prompt (labels/reward.py: bucket_of)."""
    request_tokens: int
    """Ids of the prompt after those of the answer before: a message of the user, or answers of tools."""
    prompt_tokens: int
    """Ids of the whole prompt."""
    number: int
    """Answers of the session before this one."""
    began: float
    """Unix seconds."""
    user_mean: float
    """What the user's sessions of the batch were worth whose labels were due before this session opened, relative to
    their buckets and shrunk: the sum of n differences / (n + kappa) (baselines.py); 0 without such sessions."""


Feature = Callable[[AnswerFacts], Sequence[float]]
"""Facts -> columns, as many for every answer."""


def _hour(facts: AnswerFacts) -> tuple[float, float]:
    angle = 2 * math.pi * (facts.began % DAY_S) / DAY_S
    return math.sin(angle), math.cos(angle)


def _kind(facts: AnswerFacts) -> tuple[float, ...]:
    kind = facts.bucket.partition("/")[0]
    return tuple(float(kind == one) for one in KINDS)


FEATURES: Mapping[str, Feature] = {
    "kind": _kind,
    "request_length": lambda facts: (math.log1p(facts.request_tokens),),
    "prompt_size": lambda facts: (math.log1p(facts.prompt_tokens),),
    "turn_number": lambda facts: (math.log1p(facts.number),),
    "hour": _hour,
    "user_mean": lambda facts: (facts.user_mean,),
}
"""Name -> feature."""
CAUSED = frozenset((*SIGNALS, "edit_size", "lines", "latency", "answer_length", "finish_reason", "cached", "reward"))
"""What an answer causes: every signal, and what else a person may think of."""


def check_features(names: Sequence[str]) -> None:
    """Raises UserError for a name of what the answer causes, an unknown one, one that is there twice, and for none."""
    if not names:
        raise UserError(f'{PLACE} is empty; name some of {", ".join(FEATURES)}, or use baseline="shrinkage".')
    for name in names:
        if name in CAUSED:
            raise UserError(
                f"{PLACE} has {name!r}, which the answer causes: a baseline that knows it takes away the effect that "
                f"is to be learned; use what is known before the answer, such as {', '.join(FEATURES)}."
            )
        if list(names).count(name) > 1:
            raise UserError(f"{PLACE} has {name!r} twice; name it once.")
        if ":" not in name:
            resolve(name, FEATURES, PLACE)


def resolve_features(names: Sequence[str]) -> list[Feature]:
    """Returns features by name, or by the import paths of a user's own. Raises UserError as check_features does."""
    check_features(names)
    return [resolve(name, FEATURES, PLACE) for name in names]
