"""Groups of episodes -> rows -> batches of one fixed shape for the Learner."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import Row
from composer_jax.data.packing import plan_packing


@dataclasses.dataclass(frozen=True)
class Group:
    """The episodes of one Task with what each is worth. Episodes the infrastructure lost are not in it."""

    episodes: Sequence[Episode]
    rewards: Sequence[float]


@dataclasses.dataclass(frozen=True)
class WeightedRow:
    """One training row and the one advantage that all of its sampled tokens carry."""

    row: Row
    advantage: float


def weighted_rows(groups: Sequence[Group], algorithm) -> list[WeightedRow]:
    """Rows that have something to teach: those of episodes whose advantage is not zero."""
    rows = []
    for group in groups:
        for episode, advantage in zip(group.episodes, algorithm(group.rewards), strict=True):
            if advantage != 0:
                rows += [WeightedRow(row, float(advantage)) for row in episode.transcript.rows()]
    return rows


def learner_batches(rows: Sequence[WeightedRow], *, seq_len: int, batch_size: int) -> list[dict[str, np.ndarray]]:
    """Packs rows first-fit into batches [batch_size, seq_len]; see train/losses.py for the fields."""
    if not rows:
        return []
    packing = plan_packing([len(r.row.tokens) for r in rows], seq_len=seq_len, batch_size=batch_size)
    segments = packing.segments()
    fields = {
        "tokens": packing.place([r.row.tokens for r in rows], np.int32),
        "positions": packing.place([np.arange(len(r.row.tokens)) for r in rows], np.int32),
        "segments": segments,
        "weights": packing.place([r.row.sampled for r in rows], np.float32),
        "advantages": packing.place([np.where(r.row.sampled, r.advantage, 0) for r in rows], np.float32),
        "sampler_logprobs": packing.place([r.row.logprobs for r in rows], np.float32),
    }
    return [{name: a[i : i + batch_size] for name, a in fields.items()} for i in range(0, len(segments), batch_size)]
