"""The episodes of a simulated run: seconds in a sandbox, tokens, and what becomes of each attempt."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from composer_jax.errors import UserError
from composer_jax.scale.simulation.assumptions import Assumptions

FINISHED, LOST, HUNG = range(3)
"""Fates of an attempt: it is graded, it is lost when it ends, or it samples nothing until the time limit ends it."""
_NORMAL_P99 = 2.3263478740408408
"""99th percentile of a standard normal distribution."""
_CHUNK = 32_768
"""Attempts drawn at once."""


class Attempt(NamedTuple):
    """One attempt at an episode."""

    tool_s: float
    """Seconds in which the sandbox works and the engine does not."""
    sampled: float
    """Tokens that the engine samples."""
    row_tokens: float
    """Tokens of its training rows, which repeat the prompt after each summary."""
    fate: int = FINISHED


class Workload(Protocol):
    """The attempts of every episode, by the number of its group."""

    def attempts(self, group: int) -> Sequence[Attempt]:
        """Returns the first attempt at each episode of a group; each group is asked for once, in ascending order."""
        ...

    def retry(self, group: int, episode: int, tries: int) -> Attempt:
        """Returns the attempt after `tries` lost ones at an episode of a group."""
        ...

    def is_trained(self, group: int) -> bool:
        """Whether the rewards of the group differ, so that it costs training."""
        ...


class DrawnWorkload:
    """A Workload drawn from Assumptions; equal seeds draw equal episodes, whatever the order in which they end.

    Attributes:
      prefilled_per_sampled: mean tokens that the engine prefills over mean tokens that it samples. Contexts stay cached
        between turns, so that a prompt is prefilled once per summary and an observation once.
      longest_context: mean tokens of an episode's longest context.
    """

    def __init__(self, assumed: Assumptions, *, group_size: int, max_model_len: int, max_turns: int, seed: int = 0):
        """
        Args:
          max_model_len: tokens of a context, at which a summary begins the next.
          max_turns: the limit of an episode.

        Raises:
          UserError: the prompt leaves no room in a context.
        """
        if assumed.prompt_tokens >= max_model_len:
            raise UserError(
                f"--prompt_tokens={assumed.prompt_tokens} leaves no room in a context of "
                f"sampler.max_model_len={max_model_len}; use a shorter prompt or a larger max_model_len."
            )
        self._assumed, self._group_size, self._seed = assumed, group_size, seed
        self._max_model_len, self._max_turns = max_model_len, max_turns
        self._chunk, self._attempts, self._trained = -1, [], []
        self._groups_per_chunk = max(1, _CHUNK // group_size)
        self._retries = np.random.default_rng([seed, 1])
        turns = self._draw_turns(np.random.default_rng([seed, 2]), 200_000)
        self.prefilled_per_sampled = float(np.sum(self._prefilled(turns)) / np.sum(turns * assumed.turn_tokens))
        ends = assumed.prompt_tokens + turns * (assumed.turn_tokens + assumed.observation_tokens)
        self.longest_context = float(np.minimum(ends, max_model_len).mean())

    def attempts(self, group: int) -> list[Attempt]:
        chunk, place = divmod(group, self._groups_per_chunk)
        if chunk != self._chunk:
            rng = np.random.default_rng([self._seed, 0, chunk])
            self._chunk = chunk
            self._attempts = self._draw(rng, self._groups_per_chunk * self._group_size)
        return self._attempts[place * self._group_size : (place + 1) * self._group_size]

    def retry(self, group: int, episode: int, tries: int) -> Attempt:
        return self._draw(self._retries, 1)[0]

    def is_trained(self, group: int) -> bool:
        # The golden ratio's multiples spread evenly over [0, 1): every batch has about the same number of equal groups.
        return (group * 0.6180339887498949) % 1.0 >= self._assumed.equal_groups

    def _draw(self, rng: np.random.Generator, n: int) -> list[Attempt]:
        assumed = self._assumed
        turns = self._draw_turns(rng, n)
        spread = assumed.tool_spread
        tool_s = turns * (assumed.tool_s * rng.lognormal(-spread * spread / 2, spread, n) + assumed.command_s)
        sampled = turns * assumed.turn_tokens
        rows = sampled + self._prefilled(turns)
        fate, done = rng.random(n), rng.random(n)
        lost = fate < assumed.lost_fraction
        hung = ~lost & (fate < assumed.lost_fraction + assumed.hung_fraction)
        fates = np.where(lost, LOST, np.where(hung, HUNG, FINISHED))
        tool_s, sampled = (
            np.where(lost, tool_s * done, tool_s + assumed.grade_s),
            np.where(lost, sampled * done, sampled),
        )
        columns = (column.tolist() for column in (tool_s, sampled, rows, fates))
        return [Attempt(*values) for values in zip(*columns, strict=True)]

    def _draw_turns(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Draws float64 [n], at least one turn each."""
        median, ratio = self._assumed.turns_median, self._assumed.turns_p99 / self._assumed.turns_median
        if self._assumed.turns_tail == "lognormal":
            turns = median * np.exp(rng.standard_normal(n) * math.log(ratio) / _NORMAL_P99)
        else:  # x = least * (1 - u) ** (-1 / shape): half are below least * 2 ** (1 / shape), 1 % above * 100 ** ...
            inverse_shape = math.log(ratio) / math.log(50)
            turns = median * (2 * (1 - rng.random(n))) ** -inverse_shape
        return np.clip(turns, 1, self._max_turns)

    def _prefilled(self, turns: np.ndarray) -> np.ndarray:
        """Returns the tokens that are not sampled: the observations, and the prompt once per context."""
        assumed = self._assumed
        answers = turns * (assumed.turn_tokens + assumed.observation_tokens)
        room = self._max_model_len - assumed.prompt_tokens
        return turns * assumed.observation_tokens + assumed.prompt_tokens * np.maximum(np.ceil(answers / room), 1)
