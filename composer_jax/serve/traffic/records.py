"""Records of production traffic: sessions, turns and events. serve writes them; realtime and clients share the words.

A turn holds token ids, never text. An event holds counts, hashes and identifiers, never code.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

SCHEMA = 1
"""Version of these records; a folder of another one is refused."""

Consent = Literal["training", "evals", "none"]
CONSENTS: tuple[Consent, ...] = ("training", "evals", "none")
"""What a user lets us do with a turn: train on it, only measure with it, or not store it (the default)."""

TurnKind = Literal["main", "side", "summary"]
TURN_KINDS: tuple[TurnKind, ...] = ("main", "side", "summary")
"""An answer of the conversation; a side request of the harness, such as a title, which is never trained; a summary with
which the harness shortens the conversation."""


@dataclasses.dataclass(frozen=True)
class SessionRecord:
    """Whose conversation a session is. Users, repositories, organisations and owners are salted hashes."""

    session: str
    """X-Session-ID."""
    owner: str
    """Hash of the API key that opened the session; only this key may send its events."""
    user: str
    """Hash of X-User-ID, or of the API key without one."""
    repository: str
    """Hash of X-Repository; empty if the client named none."""
    organisation: str
    """Name in the folder's policy, or empty."""
    opened: float
    """Unix seconds by the server's clock."""
    arm: str = ""
    """The arm of a canary that answered: "anchor", "candidate", or empty outside canaries."""
    consent_text: str = ""
    """Hash of the policy's consent text when the session opened."""


@dataclasses.dataclass(frozen=True)
class SampledTurn:
    """One sampled answer. The prompt is its parent's prompt and answer, and then `suffix`."""

    id: str
    """See `turn_id`."""
    session: str
    answer: str
    """The answer's id in OpenAI's API, by which events name the turn."""
    choice: int
    """Index among the answers to one request (n > 1)."""
    parent: str
    """Id of the turn whose prompt and answer begin this prompt; empty for a root. Turns of one parent are a fork."""
    suffix: Sequence[int]
    """Ids of the prompt after those of the parent."""
    tokens: Sequence[int]
    """Sampled ids; of a stream that was cut, those that the user had been sent."""
    logprobs: Sequence[float]
    """Of the distribution that was sampled from, temperature and truncation included."""
    raw_logprobs: Sequence[float]
    """At temperature 1."""
    versions: Sequence[int]
    """Version of the weights that sampled each token."""
    finish_reason: str
    """stop | length | cancelled (the user or the control plane ended it)."""
    kind: TurnKind
    consent: Consent
    """training or evals: a turn without consent is not written."""
    sampling: Mapping[str, Any]
    """Parameters of the request: temperature, top_k, top_p, min_p, seed, max_tokens."""
    template: str
    """Fingerprint of tokenizer, chat template and end tokens."""
    tools: str
    """Fingerprint of the declared tools; empty without."""
    time: float
    """Unix seconds by the server's clock when the answer ended."""
    seconds: float
    """From the request to the end of the answer."""
    cached: int
    """Tokens of the prompt that were in the cache."""
    has_secret: bool
    """Whether the text of its tokens or of its prompt has a secret or an e-mail address. Never trained then."""
    routing: str | None = None
    """Experts of the tokens from the last one of the parent on (of a root: of all), as base64 of a NumPy file
    (serve/token_details.py); None where replay is off, and for a stream that was cut."""


EventKind = Literal[
    "shown",
    "accepted",
    "rejected",
    "undo",
    "edited_after",
    "commit",
    "tests_run",
    "follow_up",
    "regenerate",
    "stop_pressed",
    "thumb",
    "session_closed",
    "tool_error",
    "repo_unreachable",
]

EVENT_FIELDS: Mapping[EventKind, Mapping[str, str]] = {
    "shown": {"hunks": "hashes"},
    "accepted": {"hunks": "hashes"},
    "rejected": {"hunks": "hashes"},
    "undo": {"hunks": "hashes"},
    "edited_after": {
        "horizon": "seconds",
        "added": "count",
        "added_kept": "count",
        "deleted": "count",
        "deleted_kept": "count",
        "censored": "count",
        "others": "count",
        "others_kept": "count",
    },
    "commit": {"added_kept": "count"},
    "tests_run": {"exit_code": "integer", "phase": "before|after"},
    "follow_up": {},
    "regenerate": {},
    "stop_pressed": {},
    "thumb": {"value": "-1|1"},
    "session_closed": {"reason": "user|timeout"},
    "tool_error": {"error": "invalid_arguments|unknown_tool|environment|provider|timeout|aborted|unknown"},
    "repo_unreachable": {},
}
"""Kind -> what its payload holds, all of it required, and nothing else. "hashes" is a list of hexadecimal digests,
"count" an integer from 0, "seconds" a number from 0, and "a|b" one of these values.

edited_after: at `horizon` seconds after the session's last edit, `added` lines that the agent's final diff had added,
of which `added_kept` are still there; `deleted` lines that it had deleted, of which `deleted_kept` are still absent;
`censored` lines of both that nobody can judge (another branch, another agent's edit) and that are in no other count;
`others` lines of the same files that are not the agent's, of which `others_kept` survived.
"""


@dataclasses.dataclass(frozen=True)
class Event:
    """What a user did with an answer."""

    id: str
    """Chosen by the client; a second event of this id changes nothing."""
    session: str
    kind: EventKind
    turn: str
    """`SampledTurn.answer` of the answer that it is about; empty for events of the whole session."""
    time: float
    """Unix seconds by the server's clock: of arrival, minus the age that the client reported."""
    arrival: float
    """Unix seconds by the server's clock."""
    payload: Mapping[str, Any]
    """See EVENT_FIELDS."""


@dataclasses.dataclass(frozen=True)
class SessionTraffic:
    """All that is known of a session."""

    record: SessionRecord
    turns: Sequence[SampledTurn]
    """By time; a parent stands before its children."""
    events: Sequence[Event]
    """By time."""


def turn_id(session: str, parent: str, suffix: Sequence[int], choice: int, answer: str) -> str:
    """Returns the id of a turn, by which a second insert is known: 32 hexadecimal digits."""
    text = repr((session, parent, list(suffix), choice, answer))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
