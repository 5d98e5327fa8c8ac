"""WorkerSetup: what a worker needs for episodes; the trainer sends it. Code and sandboxes are the worker's own."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

from composer_jax.agent.episode_context import EpisodeContext, EpisodeSettings
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.formats import chat_format_kind
from composer_jax.data.chat.load_chat_format import load_chat_format, load_tokenizer
from composer_jax.data.chat.tool_prompt import TOOL_PROMPT
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from composer_jax.tasks.images import ImagePools
from composer_jax.tasks.result_cache import ResultCache


@dataclasses.dataclass(frozen=True)
class WorkerSetup:
    """The parts of an EpisodeContext that do not depend on the machine."""

    tokenizer_files: Mapping[str, str]
    """File name -> text, as load_chat_format reads them: tokenizer.json and what belongs to it."""
    chat_format: str = ""
    """As config.data.chat_format; empty takes the format that follows from the files."""
    tool_prompt: str = TOOL_PROMPT
    """As in load_chat_format."""
    settings: EpisodeSettings = dataclasses.field(default_factory=EpisodeSettings)
    """What the context of every worker has."""
    sandbox_limits: SandboxLimits = dataclasses.field(default_factory=SandboxLimits)
    """What one sandbox may use."""
    network: bool = False
    """Whether sandboxes of tasks that need the network get that of the worker's machine."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Makes the setup of a dict of dataclasses.asdict. Raises UserError for limits below 1."""
        settings, sandbox_limits = EpisodeSettings.from_json(data["settings"]), SandboxLimits(**data["sandbox_limits"])
        return cls(**{**data, "settings": settings, "sandbox_limits": sandbox_limits})

    def chat(self) -> ChatFormat:
        """Returns the chat format of the run. Raises UserError for files or a name that give none."""
        files = _Texts(self.tokenizer_files)
        if self.chat_format:
            return chat_format_kind(self.chat_format)(load_tokenizer(files))
        return load_chat_format(files, tool_prompt=self.tool_prompt)

    @contextlib.asynccontextmanager
    async def episode_context(self, sandboxes: int) -> AsyncIterator[EpisodeContext]:
        """Yields the context of episodes on this machine, with at most `sandboxes` sandboxes in use at once.

        Raises UserError if this machine cannot build sandboxes, or the setup gives no chat format.
        """
        chat = self.chat()
        async with (
            LocalSandboxPool(self.sandbox_limits, size=sandboxes, network=self.network) as pool,
            ImagePools(sandboxes) as images,
        ):
            yield EpisodeContext(chat, pool, self.settings, ResultCache(), images)


@dataclasses.dataclass(frozen=True)
class _Texts:
    """TextFiles (data/text_files.py) that came from the trainer."""

    texts: Mapping[str, str]
    name: str = "the trainer's tokenizer"

    def text(self, file: str) -> str | None:
        return self.texts.get(file)
