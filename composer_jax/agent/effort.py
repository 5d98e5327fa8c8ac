"""Effort levels: how much thinking a prompt asks for, and what length costs at that level.

The system message of an episode names its level, and the length cost of its reward is multiplied by the level's factor,
so that one policy learns to spend what it is asked to spend. A group has one level: its episodes are compared with one
another, and differ by the policy alone. Levels are ours; Composer 2 publishes none.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_jax.errors import UserError
from composer_jax.seeds import hash_seed

LEVEL, BUDGET = "{level}", "{budget}"
"""Stand for the name and the thinking tokens of a level in EffortConfig.prompt."""


@dataclass(frozen=True)
class EffortLevel:
    """One level of effort."""

    thinking_tokens: int = 1024
    """Tokens of thinking for each message that the prompt names (not published). Nothing enforces them but the price
    of length."""
    length_factor: float = 1.0
    """Factor on rl.reward.weight, the price of length; below 1 for a level that may take longer."""

    def __post_init__(self) -> None:
        if self.thinking_tokens < 0 or self.length_factor < 0:
            raise UserError(
                f"A level of rl.reward.effort has thinking_tokens={self.thinking_tokens} and "
                f"length_factor={self.length_factor}; neither may be negative."
            )


@dataclass(frozen=True)
class EffortConfig:
    """The levels of effort that RL draws from, and how a prompt names them."""

    levels: Mapping[str, EffortLevel] = field(default_factory=dict)
    """Name -> level; each group of RL draws one, all equally often. Without levels no prompt speaks of effort."""
    prompt: str = f"Effort: {LEVEL}. Think for at most {BUDGET} tokens before a message."
    """Text at the end of the system message (not published). {level} stands for the name, {budget} for the tokens."""

    def __post_init__(self) -> None:
        if LEVEL not in self.prompt and BUDGET not in self.prompt:
            raise UserError(
                f"rl.reward.effort.prompt={self.prompt!r} has neither {LEVEL} nor {BUDGET}; add one, or all levels "
                "have the same prompt."
            )
        if "" in self.levels:
            raise UserError("rl.reward.effort.levels has a level without a name; give it one.")

    def level(self, name: str) -> EffortLevel:
        """Returns the level called `name`. Raises UserError if there is none."""
        if name not in self.levels:
            known = ", ".join(self.levels) or "none"
            raise UserError(f"effort {name!r} is not a level of rl.reward.effort.levels, which has {known}.")
        return self.levels[name]

    def length_factor(self, name: str) -> float:
        """Returns the factor of a level on the price of length; 1 for "", which is not a level."""
        return self.level(name).length_factor if name else 1.0

    def system_prompt(self, name: str, system_prompt: str) -> str:
        """Returns a system message that ends with the text of a level; unchanged for "", which is not a level."""
        if not name:
            return system_prompt
        text = self.prompt.replace(LEVEL, name).replace(BUDGET, str(self.level(name).thinking_tokens))
        return f"{system_prompt}\n\n{text}" if system_prompt else text


def draw_effort(config: EffortConfig, seed: int, task_id: str) -> str:
    """Returns the level of the group that attempts a task: a pure function of its arguments; "" without levels.

    seed: of the run.
    """
    if not config.levels:
        return ""
    return random.Random(hash_seed("effort", seed, task_id)).choice(sorted(config.levels))
