"""Selection: which sessions and answers a batch trains; every one that it does not is counted by its reason.

Malformed calls, questions, and sessions without an edit stay in: a policy learns to make what is dropped for it.
Sessions are read one at a time, and only numbers are kept of them.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from composer_jax.errors import UserError
from composer_jax.realtime.batches.credit import AnswerPlace, not_overwritten
from composer_jax.realtime.batches.turn_tree import own_routes, path_of
from composer_jax.realtime.batches.versions import TrainableVersions
from composer_jax.realtime.labels.edits import delays
from composer_jax.realtime.labels.label_sessions import TrafficReader
from composer_jax.realtime.labels.store import Label
from composer_jax.realtime.labels.window import continued_turns, label_window
from composer_jax.serve.traffic.records import Consent, SampledTurn, SessionRecord, SessionTraffic

REASONS: Mapping[str, str] = {
    "forgotten": "the session has a tombstone",
    "organisation": "its organisation does not allow training now, or is none of the folder's any more",
    "window": "the label is of another part of the session",
    "side": "a request of the harness itself",
    "left": "the user did not go on with it, and nothing says that another answer was preferred",
    "consent": "the turn or one before it is for evals only",
    "secret": "its text, or that of its prompt, has a secret",
    "empty": "nothing was sampled",
    "sampling": "not sampled at temperature 1 without truncation: the learner's ratio would be of another density",
    "version": "a token of a version that is too old, or was rolled back",
    "arm": "in a canary, a token of another version than that of the session's arm",
    "long": "longer than the learner's rows",
    "routes": "without the experts that router replay needs, or with those of another network",
}
"""Reason -> what it means; of a session it is that of most of its turns."""
UNTRUNCATED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclasses.dataclass(frozen=True)
class LabelledSession:
    """A labelled session."""

    label: Label
    record: SessionRecord
    reader: TrafficReader
    consent: Consent | None = None
    """What its organisation allows now; None for a session of no organisation."""
    retention_days: int | None = None
    """After which its folder deletes it; None is never."""


@dataclasses.dataclass(frozen=True)
class SelectionRules:
    """What a session is held to."""

    horizon: float
    versions: TrainableVersions
    longest_row: int | None = None
    """Ids of the learner's longest row; None has no limit."""
    route_shape: tuple[int, int] | None = None
    """(expert layers, experts per token) where the learner replays routes."""


@dataclasses.dataclass(frozen=True)
class SelectedTurn:
    """A turn that is trained, in numbers."""

    id: str
    place: AnswerPlace | None
    """Of a continued answer or a summary; None for an answer that was rejected."""
    chosen: str
    """Of a rejected answer: the id of the turn that was preferred; else ""."""
    tokens: int
    """Sampled ids."""
    versions: tuple[int, int]
    """The oldest and the newest version of them."""
    request_tokens: int
    prompt_tokens: int
    number: int
    """Continued answers before it."""
    began: float
    """Unix seconds."""


@dataclasses.dataclass(frozen=True)
class SelectedSession:
    """A session that is trained."""

    candidate: LabelledSession
    turns: tuple[SelectedTurn, ...]
    """At least one of which has a place."""
    answers: int
    """Continued answers, trained or not."""

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return sum(turn.tokens for turn in self.turns)


@dataclasses.dataclass
class Selection:
    """What was selected, and what was not."""

    sessions: list[SelectedSession] = dataclasses.field(default_factory=list)
    dropped_sessions: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Reason -> sessions."""
    dropped_turns: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Reason -> turns, of sessions that are trained."""
    turns_of_dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Reason -> turns, of sessions of which no turn is trained. A session that was dropped as a whole has none here."""
    forgotten: list[str] = dataclasses.field(default_factory=list)
    """The sessions that have a tombstone."""


def select_sessions(candidates: Iterable[LabelledSession], rules: SelectionRules) -> Selection:
    """Returns the sessions that can be trained, in their order."""
    selection = Selection()
    oldest = min(rules.versions.versions, default=0)
    for candidate in candidates:
        newest = candidate.label.last_version
        if newest is not None and newest < oldest:  # it says so without its turns, at every look for new sessions
            selection.dropped_sessions["version"] += 1
            continue
        traffic = read_window(candidate, rules.horizon)
        if isinstance(traffic, str):
            selection.dropped_sessions[traffic] += 1
            selection.forgotten += [candidate.record.session] if traffic == "forgotten" else []
            continue
        session, reasons = _select_turns(candidate, traffic, rules)
        if session:
            selection.dropped_turns.update(reasons)
            selection.sessions.append(session)
        else:
            selection.turns_of_dropped.update(reasons)
            selection.dropped_sessions[max(reasons, key=lambda one: reasons[one], default="empty")] += 1
    return selection


def read_window(candidate: LabelledSession, horizon: float) -> SessionTraffic | str:
    """Returns what the label of a session saw, or the reason for which the session is not trained as a whole.

    Consent is asked for again: an organisation's word of now, and tombstones.
    """
    session, reader = candidate.record.session, candidate.reader
    if candidate.record.organisation and candidate.consent != "training":
        return "organisation"
    if reader.is_forgotten(session):
        return "forgotten"
    try:
        traffic = reader.read(session)
    except UserError:
        if reader.is_forgotten(session) or all(one.session != session for one in reader.sessions()):
            return "forgotten"
        raise
    window = label_window(traffic, horizon)
    if window.start != candidate.label.start:
        return "window"
    side = [turn for turn in traffic.turns if turn.kind == "side"]  # what a request of the user can come after
    turns = sorted([*window.traffic.turns, *side], key=lambda turn: turn.time)
    return dataclasses.replace(window.traffic, turns=tuple(turns))


def _select_turns(
    candidate: LabelledSession, traffic: SessionTraffic, rules: SelectionRules
) -> tuple[SelectedSession | None, collections.Counter[str]]:
    """Returns the session with its trained turns, or None, and how many turns were dropped for each reason."""
    by_id = {turn.id: turn for turn in traffic.turns}
    answers = continued_turns(dataclasses.replace(traffic, turns=[t for t in traffic.turns if t.kind != "side"]))
    preferred = _preferred(traffic, answers)
    shares = dict(zip((turn.id for turn in answers), not_overwritten(traffic, answers), strict=True))
    order, allowed = {turn.id: i for i, turn in enumerate(answers)}, rules.versions.of_session(candidate.record)
    with_routes = _with_routes(traffic.turns, rules.route_shape)
    trained: dict[str, SelectedTurn] = {}
    reasons: collections.Counter[str] = collections.Counter()
    for turn in traffic.turns:
        path = path_of(turn, by_id)
        before = order.get(turn.id, sum(one.time < turn.time for one in answers))
        place = None
        if turn.id in order:
            place = AnswerPlace(turn.answer, len(answers) - before - 1, shares[turn.id])
        elif turn.kind == "summary" and all(one.id in order or one.kind != "main" for one in path):
            place = AnswerPlace("", len(answers) - before)
        is_wanted = place is not None or turn.id in preferred
        reason = _reason(turn, path, is_wanted, allowed, rules) or ("" if turn.id in with_routes else "routes")
        if reason:
            reasons[reason] += 1
            continue
        prompt = sum(len(one.suffix) + len(one.tokens) for one in path) - len(turn.tokens)
        trained[turn.id] = SelectedTurn(
            id=turn.id,
            place=place,
            chosen="" if place else preferred[turn.id],
            tokens=len(turn.tokens),
            versions=(min(turn.versions), max(turn.versions)),
            request_tokens=len(turn.suffix),
            prompt_tokens=prompt,
            number=before,
            began=turn.time - turn.seconds,
        )
    without = [one for one in trained.values() if one.chosen and one.chosen not in trained]
    reasons["left"] += len(without)
    turns = tuple(one for one in trained.values() if one not in without)
    reasons = +reasons
    return (SelectedSession(candidate, turns, len(answers)) if turns else None), reasons


def _preferred(traffic: SessionTraffic, answers: Sequence[SampledTurn]) -> dict[str, str]:
    """Returns rejected turn -> the continued turn that the user preferred to it: another answer to one prompt.

    The user asked for another answer in place of the rejected one (an event `regenerate`), went back from another
    answer to the first, or was shown several answers to one request and went on with one. A retry that nobody asked for
    says nothing.
    """
    asked = {answer for answer, _ in delays(traffic, "regenerate")}
    continued = {turn.id for turn in answers}
    parents = {turn.parent for turn in traffic.turns if turn.kind != "side"}
    others = [turn for turn in traffic.turns if turn.kind == "main" and turn.id not in continued]
    pairs = {}
    for chosen in answers:
        for turn in others:
            if turn.parent != chosen.parent or list(turn.suffix) != list(chosen.suffix):
                continue
            went_on = chosen.id in parents
            is_one_request = turn.answer == chosen.answer
            was_beside = is_one_request and turn.id not in parents
            went_back = chosen.answer in asked and turn.time > chosen.time
            if (went_on and (was_beside or went_back)) or (turn.answer in asked and not is_one_request):
                pairs[turn.id] = chosen.id
    return pairs


def _reason(
    turn: SampledTurn,
    path: Sequence[SampledTurn],
    is_wanted: bool,
    allowed: frozenset[int],
    rules: SelectionRules,
) -> str:
    """Returns why a turn is not trained; "" if it is. path: the turn and those before it."""
    versions = set(turn.versions)
    tests = (
        ("side", turn.kind == "side"),
        ("left", not is_wanted),
        ("consent", any(one.consent != "training" for one in path)),
        ("secret", any(one.has_secret for one in path)),
        ("empty", not turn.tokens),
        ("sampling", any(turn.sampling.get(name, value) != value for name, value in UNTRUNCATED.items())),
        ("version", not versions <= rules.versions.versions),
        ("arm", not versions <= allowed),
        ("long", rules.longest_row and sum(len(t.suffix) + len(t.tokens) for t in path) > rules.longest_row),
    )
    return next((reason for reason, is_so in tests if is_so), "")


def _with_routes(turns: Sequence[SampledTurn], shape: tuple[int, int] | None) -> set[str]:
    """Returns the turns whose ids, with all before them, have stored experts of this shape; all turns without one."""
    if shape is None:
        return {turn.id for turn in turns}
    known: set[str] = set()
    for turn in turns:
        if not turn.parent or turn.parent in known:
            routes = own_routes(turn)
            if routes is not None and routes.shape[1:] == shape:
                known.add(turn.id)
    return known
