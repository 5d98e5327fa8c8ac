"""Penalties: what an episode pays for behaviour that its grade does not see (Composer 2, section 4.2).

Every behaviour is a number from 0 to 1 of one episode. All of them are measured and logged; those with a price in
rl.reward.penalties cost it, also in unsolved episodes: a policy that pays only for success learns to misbehave where it
expects to fail.
"""

from collections.abc import Callable, Mapping

from composer_jax.agent.episode import Episode
from composer_jax.agent.usage import SHELL
from composer_jax.errors import UserError
from composer_jax.extensions import import_object

Behavior = Callable[[Episode], float]

COMMENT_LIMIT = 0.5
"""Fraction of the added source lines that may be comments before they count as reasoning in comments (ours)."""


def behaviors(episode: Episode, own: Mapping[str, str]) -> dict[str, float]:
    """Returns the behaviours of an episode by name, each from 0 to 1.

    own: those of rl.reward.behaviors.

    Raises UserError if an import path does not resolve, or its function returns a number out of range.
    """
    values = {name: measure(episode) for name, measure in BEHAVIORS.items()}
    for name, measure in import_behaviors(own).items():
        values[name] = value = float(measure(episode))
        if not 0 <= value <= 1:
            raise UserError(f"rl.reward.behaviors.{name} ({own[name]}) returned {value}; a behaviour is from 0 to 1.")
    return values


def import_behaviors(own: Mapping[str, str]) -> dict[str, Behavior]:
    """Returns the functions of rl.reward.behaviors by name. Raises a UserError for a path that does not resolve."""
    return {name: import_object(path, f"config.rl.reward.behaviors.{name}") for name, path in own.items()}


def _comment_reasoning(episode: Episode) -> float:
    """0 up to the limit, from there linear to 1 for edits of comments alone."""
    ratio = _ratio(episode.usage.comment_lines, episode.usage.added_lines)
    return max(0.0, ratio - COMMENT_LIMIT) / (1 - COMMENT_LIMIT)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


BEHAVIORS: Mapping[str, Behavior] = {
    "malformed_calls": lambda e: _ratio(e.usage.malformed_calls, e.usage.total_calls),
    "shell_duplicates": lambda e: _ratio(e.usage.shell_duplicates, e.usage.calls.get(SHELL, 0)),
    "unfinished_todos": lambda e: _ratio(e.usage.unfinished_todos, e.usage.todos),
    "comment_reasoning": _comment_reasoning,
    "question_instead_of_edit": lambda e: float(e.usage.asked_question and not e.usage.changed_files),
}
"""Behaviour -> its measure.

malformed_calls: fraction of the calls that no tool could execute. shell_duplicates: of the shell calls that only do
what another tool of the task does. unfinished_todos: of the items of the plan. comment_reasoning: of the added lines
that are comments, beyond COMMENT_LIMIT. question_instead_of_edit: 1 for a question at the end and no changed file,
because every task of ours needs an edit: graders look at files.
"""
