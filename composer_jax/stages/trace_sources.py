"""Sources of SFT traces: ours by name, a user's by import path."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from composer_jax.agent.config import AgentConfig
from composer_jax.agent.episode import Episode
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.conversations import conversation_trace, read_conversation
from composer_jax.data.row_files import read_rows
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.data.token_source import Trace
from composer_jax.errors import UserError
from composer_jax.extensions import resolve
from composer_jax.schema.training_config import TraceSourceConfig
from composer_jax.stages.shared_files import make_shared
from composer_jax.storage.workdir import Workdir
from composer_jax.tasks.task import Task


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
    seq_len: int | None = None
    """Tokens of a row, which no trace may exceed; None where the traces are not packed into rows."""
    workdir: Workdir | None = None
    """The run's folder; None where all processes share `folder`."""

    def make_shared(self, make: Callable[[], Path]) -> Path:
        """Calls `make` in process 0, which returns a path below `folder`; returns the path once all can read it."""
        return make_shared(self.workdir, make)


class ConversationSource(Protocol):
    """Conversations to train on, constructed as `kind(context, **options)`."""

    def traces(self) -> Sequence[Trace]:
        """Returns (token ids, trained mask) of every conversation; the same ones for the same context and options."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Returns JSON values for the stage's results, after `traces`."""
        ...


@runtime_checkable
class EpisodeSource(Protocol):
    """A ConversationSource whose traces are those of episodes, which launch.traces can write as conversations."""

    @property
    def system_prompt(self) -> str:
        """The system message of all episodes; "" for none."""
        ...

    def play(self) -> list[tuple[Task, Episode]]:
        """Plays the episodes and returns them with their tasks, in the order of `traces`."""
        ...


class ConversationFiles:
    """A ConversationSource: conversations in files of JSON lines, JSON or Parquet (data/chat/conversations.py).

    Args:
      files: a path or URL, or several: a sequence, or a text in which commas separate them.
      invalid: what happens to a row that is not a conversation to train on: "error" raises a UserError that names its
        place, "drop" counts it in the report.
      too_long: the same for a conversation longer than a row of the stage.
    """

    def __init__(
        self,
        context: SourceContext,
        files: str | Sequence[str],
        invalid: Literal["error", "drop"] = "error",
        too_long: Literal["error", "drop"] = "error",
    ):
        for name, value in (("invalid", invalid), ("too_long", too_long)):
            if value not in ("error", "drop"):
                raise UserError(f'the option {name}={value!r} of conversations is neither "error" nor "drop".')
        names = files.split(",") if isinstance(files, str) else files
        self._context, self._files = context, tuple(name.strip() for name in names if name.strip())
        if not self._files:
            raise UserError(
                "the option files of conversations is empty; name files, e.g. --config.sft.data=traces.jsonl."
            )
        self._drops = {"invalid": invalid == "drop", "too_long": too_long == "drop"}
        self._counts = {"conversations": 0, "invalid": 0, "too_long": 0}

    def traces(self) -> list[Trace]:
        """Returns (tokens int32[n], trained bool[n]) of every conversation, in the order of the files.

        Columns that are not read are logged once, with the number of their rows.

        Raises UserError for a file that cannot be read, or a row that is to be refused.
        """
        traces: list[Trace] = []
        ignored = Counter[str]()
        self._counts = dict.fromkeys(self._counts, 0)
        for file in self._files:
            path = str(Path(file).expanduser()) if file.startswith("~") else file
            for place, row in read_rows(path, lambda sentence: self._refuse("invalid", sentence)):
                try:
                    conversation = read_conversation(row)
                    ignored.update(conversation.ignored_columns)
                    trace = conversation_trace(conversation, self._context.chat)
                except (ValueError, UserError) as error:
                    self._refuse("invalid", f"{place}: {error}.", error)
                    continue
                length, seq_len = len(trace[0]), self._context.seq_len
                if seq_len is not None and length > seq_len:
                    self._refuse(
                        "too_long",
                        f"{place}: the conversation has {length} tokens and a row {seq_len}; raise sft.seq_len, or set "
                        'the option too_long="drop".',
                    )
                    continue
                traces.append(trace)
        self._counts["conversations"] = len(traces)
        if ignored:
            columns = ", ".join(f"{name} ({count} rows)" for name, count in sorted(ignored.items()))
            logging.warning("Of %s, SFT does not read these columns: %s.", ", ".join(self._files), columns)
        return traces

    def report(self) -> dict[str, Any]:
        """Returns {"conversations": {the files: how many were read, and dropped as invalid or too long}}."""
        return {"conversations": {", ".join(self._files): dict(self._counts)}}

    def _refuse(self, reason: str, sentence: str, cause: Exception | None = None) -> None:
        if not self._drops[reason]:
            raise UserError(sentence) from cause
        self._counts[reason] += 1


TRACE_SOURCES: Mapping[str, Callable[..., ConversationSource]] = {"conversations": ConversationFiles}
"""Classes by TraceSourceConfig.kind."""


def make_trace_source(name: str, config: TraceSourceConfig, context: SourceContext) -> ConversationSource:
    """Constructs the source that sft.sources.NAME describes.

    Raises UserError for a kind that is neither in TRACE_SOURCES nor an import path that resolves, or options that the
    constructor lacks.
    """
    place = f"config.sft.sources.{name}"
    kind = resolve(config.kind, TRACE_SOURCES, f"{place}.kind")
    try:
        return kind(context, **config.options)
    except TypeError as error:
        options = dict(config.options)
        raise UserError(f"{place}.options={options} do not fit {config.kind!r}: {error}.") from error
