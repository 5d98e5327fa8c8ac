"""Replay of SFT in RL: conversations that SFT trained are trained by cross-entropy beside the episodes of a step.

RL moves what it does not play as well, and mostly for the worse. Rehearsal of earlier data is the oldest remedy of
continual learning (experience replay, arXiv 1811.11682; InstructGPT mixes pretraining data into PPO, arXiv 2203.02155,
equation 2).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from composer_jax.agent.transcript import TranscriptRow
from composer_jax.data.token_source import Trace
from composer_jax.errors import UserError
from composer_jax.rl.batch import WeightedRow
from composer_jax.seeds import hash_seed


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Conversations of SFT that every RL step trains beside its episodes. Raises UserError for a value out of range."""

    fraction: float = 0.0
    """Tokens of conversations per token of episodes in the rows of a step, context included: T tokens of episodes come
    with fraction * T tokens and less than one conversation more, so that the learner computes (1 + fraction) * T. 0
    replays nothing (not published; ours)."""
    weight: float = 1.0
    """Weight of a trained token's cross-entropy. rl.algorithm.normalisers.cross_entropy divides the sum: "tokens" makes
    it this times the mean over the step's trained tokens of conversations, whatever the fraction."""

    def __post_init__(self) -> None:
        if not (self.fraction >= 0 and math.isfinite(self.fraction)):
            raise UserError(f"rl.replay.fraction={self.fraction} is not a number of at least 0; 0 replays nothing.")
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise UserError(
                f"rl.replay.weight={self.weight} trains nothing; use a number above 0, or rl.replay.fraction=0."
            )


class ReplayMix:
    """The conversations that steps draw from. A draw depends on the seed, the step and the tokens that it goes with.

    So a resumed run, another process and a replayed record draw the same rows, and nothing is saved for it.
    """

    def __init__(self, config: ReplayConfig, conversations: Sequence[Trace], longest: int, seed: int):
        """
        Args:
          conversations: (token ids int [n], trained bool [n]), as SFT trains them.
          longest: tokens of the longest row of the learner; longer conversations are left out.
          seed: of the run.

        Raises:
          UserError: no conversation is left.
        """
        self.config, self.seed = config, seed
        cut = [_until_last_target(*conversation) for conversation in conversations]
        self._conversations = [(ids, trained) for ids, trained in cut if 0 < len(ids) <= longest]
        self.left_out = len(conversations) - len(self._conversations)
        """Conversations that are longer, or train no token."""
        if not self._conversations:
            raise UserError(
                f"rl.replay.fraction={config.fraction} has nothing to replay: all {len(conversations)} conversations "
                f"of SFT train no token or are longer than a row of rl.batches, {longest} tokens; add longer rows."
            )

    def draw(self, step: int, tokens: int) -> list[WeightedRow]:
        """Returns rows of whole conversations, none for tokens=0, that train by cross-entropy alone.

        A conversation is not drawn again before all others have been.

        Args:
          step: RL steps before this one.
          tokens: T, those of the rows of the step's episodes.
        """
        wanted, drawn, rows = self.config.fraction * tokens, 0, []
        random = np.random.default_rng(hash_seed("rl replay", self.seed, step))
        while drawn < wanted:
            for number in random.permutation(len(self._conversations)):
                if drawn >= wanted:
                    break
                rows.append(self._row(number))
                drawn += len(rows[-1].row.tokens)
        return rows

    def _row(self, number: int) -> WeightedRow:
        ids, trained = self._conversations[number]
        n = len(ids)
        unsampled = TranscriptRow(ids, trained, np.zeros(n, np.float32), np.full(n, -1, np.int32))
        row = WeightedRow.of(unsampled, 0.0, weight=0.0, ce_weight=self.config.weight, kl_weight=0.0)
        return dataclasses.replace(row, episode=NO_EPISODE)


NO_EPISODE = -1
"""WeightedRow.episode of rows that no episode has."""


def _until_last_target(
    ids: Sequence[int] | np.ndarray, trained: Sequence[bool] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a conversation up to its last trained token; its first token is none, because nothing predicts it."""
    mask = np.array(trained, bool)
    mask[:1] = False
    n = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
    return np.asarray(ids[:n], np.int32), mask[:n]
