"""Groups of episodes -> rows -> batches of one fixed shape for the Learner."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import Row
from composer_jax.data.packing import plan_packing
from composer_jax.errors import UserError
from composer_jax.rl.algorithm import Algorithm


@dataclasses.dataclass(frozen=True)
class Group:
    """The graded episodes of one task and their training rewards."""

    episodes: Sequence[Episode]
    rewards: Sequence[float]


@dataclasses.dataclass(frozen=True)
class WeightedRow:
    """One training row; all its sampled tokens carry the same advantage."""

    row: Row
    advantage: float


def weighted_rows(groups: Sequence[Group], algorithm: Algorithm) -> list[WeightedRow]:
    """Returns the rows of all episodes whose advantage is not zero."""
    rows = []
    for group in groups:
        for episode, advantage in zip(group.episodes, algorithm(group.rewards), strict=True):
            if advantage != 0:
                rows += [WeightedRow(row, float(advantage)) for row in episode.transcript.rows()]
    return rows


def learner_batches(rows: Sequence[WeightedRow], shapes: Sequence[tuple[int, int]]) -> list[dict[str, np.ndarray]]:
    """Packs rows first-fit into batches of a few fixed shapes; see train/losses.py for the fields.

    Args:
      shapes: (row length, rows) by ascending length. A row goes into the first shape that holds it.

    Raises:
      UserError: a row is longer than every shape.
    """
    by_shape: dict[tuple[int, int], list[WeightedRow]] = {(length, n_rows): [] for length, n_rows in shapes}
    for row in rows:
        n = len(row.row.tokens)
        fitting = next((shape for shape in by_shape if n <= shape[0]), None)
        if fitting is None:
            raise UserError(
                f"A row of {n} tokens is longer than every training batch {tuple(by_shape)}; add a longer one."
            )
        by_shape[fitting].append(row)
    return [batch for shape, chosen in by_shape.items() for batch in _packed(chosen, *shape)]


def empty_batch(length: int, rows: int) -> dict[str, np.ndarray]:
    """Returns a batch without tokens, whose gradient is zero."""
    return {name: np.zeros((rows, length), dtype) for name, dtype in FIELDS.items()}


FIELDS = {
    "tokens": np.int32,
    "positions": np.int32,
    "segments": np.int32,
    "weights": np.float32,
    "advantages": np.float32,
    "sampler_logprobs": np.float32,
}


def _packed(rows: Sequence[WeightedRow], seq_len: int, batch_size: int) -> list[dict[str, np.ndarray]]:
    if not rows:
        return []
    packing = plan_packing([len(r.row.tokens) for r in rows], seq_len=seq_len, batch_size=batch_size)
    values = {
        "tokens": [r.row.tokens for r in rows],
        "positions": [np.arange(len(r.row.tokens)) for r in rows],
        "weights": [r.row.trained for r in rows],
        "advantages": [np.where(r.row.trained, r.advantage, 0) for r in rows],
        "sampler_logprobs": [r.row.logprobs for r in rows],
    }
    fields = {name: packing.place(value, FIELDS[name]) for name, value in values.items()}
    fields["segments"] = packing.segments()
    total = len(fields["tokens"])
    return [{name: a[i : i + batch_size] for name, a in fields.items()} for i in range(0, total, batch_size)]
