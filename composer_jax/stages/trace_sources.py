"""Sources of SFT traces that a config names by import path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from composer_jax.agent.config import AgentConfig
from composer_jax.data.chat_format import ChatFormat
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.data.traces import Trace
from composer_jax.errors import UserError
from composer_jax.extensions import import_object


@dataclass(frozen=True)
class SourceContext:
    """What a source may use of the run that it makes data for."""

    seed: int
    """The run's seed."""
    tokenizer: TextTokenizer
    """The run's tokenizer."""
    chat: ChatFormat
    """Format of all conversations."""
    agent: AgentConfig
    """Limits and compactions of episodes."""
    folder: Path
    """The run's data folder, in which a source may keep what is expensive to make."""


class ConversationSource(Protocol):
    """Conversations to train on, constructed as `kind(context, **options)`."""

    def traces(self) -> Sequence[Trace]:
        """Returns (token ids, trained mask) of every conversation; the same ones for the same context and options."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Returns JSON values for the stage's results, after `traces`."""
        ...


@dataclass(frozen=True)
class TraceSourceConfig:
    """One source of SFT traces."""

    kind: str
    """Import path of a class (SourceContext, **options) -> ConversationSource."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""


def make_trace_source(name: str, config: TraceSourceConfig, context: SourceContext) -> ConversationSource:
    """Constructs the source that sft.sources.NAME describes.

    Raises:
      UserError: an import path that does not resolve, or options that the constructor lacks.
    """
    place = f"config.sft.sources.{name}"
    kind = import_object(config.kind, f"{place}.kind")
    try:
        return kind(context, **config.options)
    except TypeError as error:
        options = dict(config.options)
        raise UserError(f"{place}.options={options} do not fit {config.kind!r}: {error}.") from error
