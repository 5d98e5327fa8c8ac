"""Episode records: what one attempt at a task looked like, in words, for people and for the report.

A run keeps them in `workdir/episodes/{before,after,rl}.jsonl`, one record a line: evaluation before RL,
evaluation after RL, and a sample of the episodes RL learned from. They are for reading; training never goes
through them (it uses the token ids of the Transcript).
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError

STAGES = ("before", "after", "rl")
KINDS = ("prompt", "assistant", "tool", "summary_request", "summary", "carry")
CONDITIONS = ("no_trigger", "short", "long", "default")


@dataclasses.dataclass(frozen=True)
class CallRecord:
    """One tool call as the model wrote it."""

    name: str
    arguments: Any  # the parsed object; for an ill-formed call the raw text
    error: str | None = None  # why it could not be carried out; None for a call that was

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(**_known_fields(cls, value))


@dataclasses.dataclass(frozen=True)
class MessageRecord:
    """One node of the transcript, decoded.

    prompt: system message and task. assistant: what the model said (its calls apart, in `calls`). tool: what
    a call gave back. summary_request: the harness asks for a summary. summary: the model's summary, the last
    message of its segment. carry: what the next segment starts from beside the prompt (the summary and the
    carried state).
    """

    kind: str  # one of KINDS
    text: str
    tokens: int  # length of the node in tokens
    sampled: bool  # the model said it (and is trained on it), or it was given
    version: int | None = None  # weight version that sampled it; None where nothing was sampled
    calls: tuple[CallRecord, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        fields = _known_fields(cls, value)
        if fields["kind"] not in KINDS:
            raise ValueError(f"message kind {fields['kind']!r} is none of {', '.join(KINDS)}")
        return cls(**{**fields, "calls": tuple(CallRecord.from_json(call) for call in fields.get("calls") or ())})


@dataclasses.dataclass(frozen=True)
class EpisodeRecord:
    """One attempt at a task."""

    task_id: str
    family: str
    split: str  # "train" | "heldout" | "unseen"
    seed: int
    reward: float | None  # None: never graded (the infrastructure failed)
    outcome: str  # "finished" | "out_of_turns" | "out_of_context" | ...
    turns: int
    summaries: int
    condition: str  # one of CONDITIONS: how the summary trigger was set
    step: int | None  # RL step; None in an evaluation
    tokens: int  # all tokens of all segments
    sampled_tokens: int  # those the model said
    summary_tokens: int  # those it said in summaries
    parts: Mapping[str, Any]  # what the reward is made of
    instruction: str
    segments: tuple[tuple[MessageRecord, ...], ...]  # the segments in order; each but the first starts anew

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Raises ValueError or TypeError, naming the field, if `value` is no episode record."""
        fields = _known_fields(cls, value)
        if fields["condition"] not in CONDITIONS:
            raise ValueError(f"condition {fields['condition']!r} is none of {', '.join(CONDITIONS)}")
        segments = tuple(tuple(MessageRecord.from_json(item) for item in segment) for segment in fields["segments"])
        return cls(**{**fields, "segments": segments})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def write_episodes(path: Path, records: Iterable[EpisodeRecord | Mapping[str, Any]]) -> Path:
    """Writes records, one a line, replacing the file atomically; plain mappings are checked first.

    Raises:
      ValueError, TypeError: a mapping that is no episode record (the message names the field).
      UserError: the file cannot be written.
    """
    lines = []
    for record in records:
        if not isinstance(record, EpisodeRecord):
            record = EpisodeRecord.from_json(record)
        lines.append(json.dumps(record.to_json(), separators=(",", ":")) + "\n")
    return write_atomically(Path(path), "".join(lines).encode())


def read_episodes(path: Path) -> list[EpisodeRecord]:
    """The records of a file in order; [] if there is no such file.

    Raises:
      UserError: a line is no episode record (the sentence names the line and the reason).
    """
    path = Path(path)
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        try:
            records.append(EpisodeRecord.from_json(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(f"line {number} of {path} is no episode record: {error}") from error
    return records


def _known_fields(cls: type, value: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{cls.__name__} takes an object, not {type(value).__name__}")
    names = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(value) - set(names))
    missing = [name for name, f in names.items() if f.default is dataclasses.MISSING and name not in value]
    if unknown or missing:
        wrong = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"missing {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"{cls.__name__}: {'; '.join(wrong)}")
    return dict(value)
