"""Penalties: what an episode pays for behaviour that its grade does not see (Composer 2, section 4.2).

Every behaviour is a number from 0 to 1, computed from Episode.usage. All graded episodes pay for theirs, also the
unsolved ones: a policy that pays only for success learns to misbehave where it expects to fail.
"""

import dataclasses
from collections.abc import Callable, Mapping

from composer_jax.agent.episode import Episode
from composer_jax.agent.usage import SHELL
from composer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class PenaltyConfig:
    """Weights of the penalties; 0 charges nothing. Weights are ours (not published): .05 to .2 is a start."""

    malformed_calls: float = 0.0
    """Price of the fraction of tool calls that no tool could execute."""
    shell_duplicates: float = 0.0
    """Price of the fraction of shell calls that only do what another tool of the task does, such as `cat`."""
    unfinished_todos: float = 0.0
    """Price of the fraction of the plan's items that are not done at the end."""
    comment_reasoning: float = 0.0
    """Price of added source lines that are all comments; fewer cost proportionally less, down to comment_limit."""
    comment_limit: float = 0.5
    """Fraction of the added source lines that may be comments without a price."""
    question_instead_of_edit: float = 0.0
    """Price of a last message that asks a question after no file was changed."""

    def __post_init__(self) -> None:
        for name in BEHAVIORS:
            if getattr(self, name) < 0:
                raise UserError(
                    f"rl.reward.penalties.{name}={getattr(self, name)} is negative; use 0 to charge nothing."
                )
        if not 0 <= self.comment_limit < 1:
            raise UserError(f"rl.reward.penalties.comment_limit={self.comment_limit} is no fraction below 1; use 0.5.")


def behaviors(episode: Episode, config: PenaltyConfig) -> dict[str, float]:
    """Returns the behaviours of an episode by the names of their weights, each from 0 to 1."""
    return {name: measure(episode, config) for name, measure in BEHAVIORS.items()}


def penalties(episode: Episode, config: PenaltyConfig) -> dict[str, float]:
    """Returns weight times behaviour for every behaviour of an episode."""
    return {name: getattr(config, name) * value for name, value in behaviors(episode, config).items()}


def _malformed_calls(episode: Episode, _: PenaltyConfig) -> float:
    return _ratio(episode.usage.malformed_calls, episode.usage.total_calls)


def _shell_duplicates(episode: Episode, _: PenaltyConfig) -> float:
    return _ratio(episode.usage.shell_duplicates, episode.usage.calls.get(SHELL, 0))


def _unfinished_todos(episode: Episode, _: PenaltyConfig) -> float:
    return _ratio(episode.usage.unfinished_todos, episode.usage.todos)


def _comment_reasoning(episode: Episode, config: PenaltyConfig) -> float:
    """0 up to the limit, from there linear to 1 for edits of comments alone."""
    ratio = _ratio(episode.usage.comment_lines, episode.usage.added_lines)
    return max(0.0, ratio - config.comment_limit) / (1 - config.comment_limit)


def _question_instead_of_edit(episode: Episode, _: PenaltyConfig) -> float:
    """Every task of ours needs an edit: graders look at files."""
    return float(episode.usage.asked_question and not episode.usage.changed_files)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


BEHAVIORS: Mapping[str, Callable[[Episode, PenaltyConfig], float]] = {
    "malformed_calls": _malformed_calls,
    "shell_duplicates": _shell_duplicates,
    "unfinished_todos": _unfinished_todos,
    "comment_reasoning": _comment_reasoning,
    "question_instead_of_edit": _question_instead_of_edit,
}
"""Behaviour, which is also the name of its weight -> its measure."""
