"""Episode records: one attempt at a task as text, for people and for the report.

A run keeps them in `workdir/episodes/{before,after,rl}.jsonl`, one record per line: evaluation before RL, evaluation
after RL, and a sample of the episodes of RL. Training does not read them; it uses the token ids of the Transcript.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError

STAGES = ("base", "before", "after", "rl")
KINDS = ("prompt", "assistant", "tool", "summary_request", "summary", "carry")


@dataclasses.dataclass(frozen=True)
class CallRecord:
    """One tool call as the model wrote it."""

    name: str
    arguments: Any  # the parsed object; the raw text of an ill-formed call
    error: str | None = None  # the reason why the call failed; None for a call that was executed


@dataclasses.dataclass(frozen=True)
class TokenRecord:
    """One sampled token."""

    text: str  # a token that ends within a character has U+FFFD
    logprob: float  # log-probability in nats, under the policy that sampled it
    advantage: float | None  # what RL multiplies log p with; None for a token that it does not train


@dataclasses.dataclass(frozen=True)
class MessageRecord:
    """One node of the transcript, decoded.

    Kinds: prompt, the system message and the task; assistant, the model's text (its tool calls are in `calls`); tool,
    the result of a call; summary_request, the harness's request for a summary; summary, the model's summary, which ends
    its segment; carry, the summary and carried state that follow the prompt in the next segment.
    """

    kind: str  # one of KINDS
    text: str
    tokens: int  # length of the node in tokens
    sampled: bool  # whether the model sampled it and is trained on it
    version: int | None = None  # weight version that sampled it; None for a node that was not sampled
    calls: tuple[CallRecord, ...] = ()
    sampled_tokens: tuple[TokenRecord, ...] = ()  # of a node that was sampled, if rl.record_tokens says so

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        fields = _known_fields(cls, value)
        if fields["kind"] not in KINDS:
            raise ValueError(f"message kind {fields['kind']!r} is unknown; the kinds are {', '.join(KINDS)}")
        calls = tuple(CallRecord(**_known_fields(CallRecord, call)) for call in fields.get("calls") or ())
        tokens = tuple(TokenRecord(**_known_fields(TokenRecord, token)) for token in fields.get("sampled_tokens") or ())
        return cls(**{**fields, "calls": calls, "sampled_tokens": tokens})


@dataclasses.dataclass(frozen=True)
class EpisodeRecord:
    """One attempt at a task."""

    task_id: str
    family: str
    split: str  # "train" | "heldout" | "unseen"
    seed: int
    reward: float | None  # None if the infrastructure failed before grading
    outcome: str  # "finished" | "out_of_turns" | "out_of_context" | ...
    turns: int
    summaries: int
    condition: str  # name of the compaction in the config: "none", ...
    step: int | None  # RL step; None in an evaluation
    tokens: int  # of all segments
    sampled_tokens: int  # sampled by the model
    summary_tokens: int  # sampled in summaries
    parts: Mapping[str, Any]  # of the reward
    instruction: str
    segments: tuple[tuple[MessageRecord, ...], ...]  # in order; each but the first starts from a summary
    tools: tuple[str, ...] = ()  # names of the task's tools; () in records of older runs

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Builds the record of a JSON object.

        Raises ValueError or TypeError if `value` is not an episode record; the message names the field.
        """
        fields = _known_fields(cls, value)
        segments = tuple(tuple(MessageRecord.from_json(item) for item in segment) for segment in fields["segments"])
        return cls(**{**fields, "segments": segments, "tools": tuple(fields.get("tools") or ())})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def write_episodes(path: Path, records: Iterable[EpisodeRecord | Mapping[str, Any]]) -> Path:
    """Writes one record per line and replaces the file atomically; mappings are validated first.

    Raises UserError if the file cannot be written, and ValueError or TypeError, which name the field, for another
    mapping.
    """
    lines = []
    for record in records:
        if not isinstance(record, EpisodeRecord):
            record = EpisodeRecord.from_json(record)
        lines.append(json.dumps(record.to_json(), separators=(",", ":")) + "\n")
    return write_atomically(Path(path), "".join(lines).encode())


def read_episodes(path: Path) -> list[EpisodeRecord]:
    """Returns the records of a file in order; [] if there is no such file.

    Raises UserError if a line is not an episode record; the message has the line number and the reason.
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
            raise UserError(f"line {number} of {path} is not an episode record: {error}") from error
    return records


def _known_fields(cls: type, value: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{cls.__name__} takes an object, not {type(value).__name__}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(value) - set(fields))
    missing = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in value]
    if unknown or missing:
        problems = [
            f"{kind} {', '.join(names)}" for kind, names in (("unknown", unknown), ("missing", missing)) if names
        ]
        raise ValueError(f"{cls.__name__}: {'; '.join(problems)}")
    return dict(value)
