"""WorkerSetup: what a worker needs for episodes; the trainer sends it. Code and sandboxes are the worker's own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

from composer_jax.agent.episode import EpisodeLimits
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.formats import chat_format_kind
from composer_jax.data.chat.load_chat_format import load_chat_format, load_tokenizer
from composer_jax.data.chat.tool_prompt import TOOL_PROMPT
from composer_jax.rl.effort import EffortConfig, EffortLevel
from composer_jax.rl.rollout import RolloutContext
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from composer_jax.tasks.images.pools import ImagePools
from composer_jax.tasks.result_cache import ResultCache


@dataclasses.dataclass(frozen=True)
class WorkerSetup:
    """The parts of a RolloutContext that do not depend on the machine."""

    tokenizer_files: Mapping[str, str]
    """File name -> text, as load_chat_format reads them: tokenizer.json and what belongs to it."""
    chat_format: str = ""
    """As config.data.chat_format; empty takes the format that follows from the files."""
    tool_prompt: str = TOOL_PROMPT
    """As in load_chat_format."""
    limits: EpisodeLimits = dataclasses.field(default_factory=EpisodeLimits)
    """What one episode may use."""
    sandbox_limits: SandboxLimits = dataclasses.field(default_factory=SandboxLimits)
    """What one sandbox may use."""
    system_prompt: str = ""
    """See RolloutContext."""
    effort: EffortConfig = EffortConfig()
    """See RolloutContext."""
    temperature: float = 1.0
    """See RolloutContext."""
    episode_seconds: float | None = None
    """See RolloutContext."""
    return_routing: bool = False
    """See RolloutContext."""

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-able dict from which `from_json` makes an equal setup."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerSetup:
        """Makes the setup of a dict of `to_json`. Raises UserError for limits below 1."""
        limits, sandbox_limits = EpisodeLimits(**data["limits"]), SandboxLimits(**data["sandbox_limits"])
        levels = {name: EffortLevel(**level) for name, level in data["effort"]["levels"].items()}
        effort = EffortConfig(levels, data["effort"]["prompt"])
        return cls(**{**data, "limits": limits, "sandbox_limits": sandbox_limits, "effort": effort})

    def chat(self) -> ChatFormat:
        """Returns the chat format of the run. Raises UserError for files or a name that give none."""
        files = _Texts(self.tokenizer_files)
        if self.chat_format:
            return chat_format_kind(self.chat_format)(load_tokenizer(files))
        return load_chat_format(files, tool_prompt=self.tool_prompt)

    @contextlib.asynccontextmanager
    async def rollout_context(self, sandboxes: int) -> AsyncIterator[RolloutContext]:
        """Yields the context of episodes on this machine, with at most `sandboxes` sandboxes in use at once.

        Raises:
          UserError: this machine cannot build sandboxes, or the setup gives no chat format.
        """
        chat = self.chat()
        async with LocalSandboxPool(self.sandbox_limits, size=sandboxes) as pool, ImagePools(sandboxes) as images:
            yield RolloutContext(
                chat,
                pool,
                self.limits,
                ResultCache(),
                images=images,
                system_prompt=self.system_prompt,
                effort=self.effort,
                temperature=self.temperature,
                episode_seconds=self.episode_seconds,
                return_routing=self.return_routing,
            )


@dataclasses.dataclass(frozen=True)
class _Texts:
    """TextFiles (data/text_files.py) that came from the trainer."""

    texts: Mapping[str, str]
    name: str = "the trainer's tokenizer"

    def text(self, file: str) -> str | None:
        return self.texts.get(file)
