"""Builds the batch of a release: the sessions that it has claimed -> numbers -> groups with given advantages.

A batch is a function of its inputs: built again, it is equal bit for bit. Sessions are read one at a time, once to
select and once to write, so that memory holds labels and numbers of all of them, and the turns of one.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.agent.episode import Episode
from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress
from composer_jax.realtime.batches.advantages import BatchNumbers, TurnNumbers, weigh_sessions
from composer_jax.realtime.batches.monitors import measure_batch
from composer_jax.realtime.batches.rules import BatchRules
from composer_jax.realtime.batches.selection import (
    LabelledSession,
    SelectedSession,
    Selection,
    SelectionRules,
    read_window,
    select_sessions,
)
from composer_jax.realtime.batches.store import write_batch
from composer_jax.realtime.batches.turn_tree import session_transcript
from composer_jax.realtime.release.releases import Release, served_versions
from composer_jax.rl.played_group import PlayedGroup

LEAST_SESSIONS = 2
"""Of a batch: a baseline is that of other sessions."""
FAMILY = "traffic"
"""Of the episodes, beside the families of tasks."""


@dataclasses.dataclass(frozen=True)
class BatchInputs:
    """What a batch is made of."""

    release: Release
    releases: Sequence[Release]
    """All of the folder, for the versions that served."""
    candidates: Sequence[LabelledSession]
    """The sessions that the release has claimed, those that are not forgotten, in the order of their opening."""
    rules: BatchRules
    selection: SelectionRules
    labeller: str
    template: str
    """Fingerprint of the tokenizer and template of the traffic."""
    before: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """{"sessions", "turns"}: reasons and counts of what was dropped with sessions that the release did not claim."""


class SessionsGone(UserError):
    """Fewer than two of the sessions that a release has claimed are left: it will never have a batch."""


class _SessionGone(Exception):
    """A session was forgotten while the batch was built."""


def build_batch(workdir: str | Path, inputs: BatchInputs) -> None:
    """Writes the batch of a release.

    A session that is forgotten before it is written is left out, and the others get their numbers anew; one that is
    forgotten later is in the batch, and the caller deletes it.

    Raises:
      SessionsGone: fewer than two sessions are left.
      UserError: as `weigh_sessions` does.
    """
    while True:
        selection = select_sessions(inputs.candidates, inputs.selection)
        if (left := len(selection.sessions)) < LEAST_SESSIONS:
            raise SessionsGone(
                f"{left} of the {len(inputs.release.sessions)} sessions that release {inputs.release.number} has "
                f"claimed can still be trained, and a baseline needs {LEAST_SESSIONS}; begin another release."
            )
        numbers = weigh_sessions(selection.sessions, inputs.rules)
        manifest = _manifest(inputs, selection, numbers)
        try:
            write_batch(workdir, inputs.release.number, manifest, _groups(selection.sessions, numbers, inputs))
        except _SessionGone:
            continue
        return


def _groups(sessions: Sequence[SelectedSession], numbers: BatchNumbers, inputs: BatchInputs) -> Iterator[PlayedGroup]:
    with Progress(len(sessions), "sessions", "batch") as progress:
        for number, (session, turns) in enumerate(zip(sessions, numbers.turns, strict=True)):
            reward = numbers.rewards[session.candidate.record.session].value
            yield _group(number, session, turns, reward, inputs.selection)
            progress.update()


def _group(
    number: int, session: SelectedSession, turns: Sequence[TurnNumbers], reward: float, rules: SelectionRules
) -> PlayedGroup:
    """Returns a session as a group of one episode, whose nodes have the advantages of its turns."""
    traffic = read_window(session.candidate, rules.horizon)
    if isinstance(traffic, str):
        raise _SessionGone
    trained = {turn.id for turn in session.turns}
    transcript = session_transcript(traffic.turns, trained, has_routes=rules.route_shape is not None)
    summaries = sum(turn.kind == "summary" for turn in traffic.turns if turn.id in trained)
    episode = Episode(
        task_id=session.candidate.record.session,
        family=FAMILY,
        split=FAMILY,
        seed=0,
        transcript=transcript,
        reward=reward,
        outcome="finished",
        turns=session.answers,
        summaries=summaries,
        advantages=tuple(one.advantage for one in turns),
    )
    return PlayedGroup(number, [episode], 0, max(turn.versions[1] for turn in session.turns))


def _manifest(inputs: BatchInputs, selection: Selection, numbers: BatchNumbers) -> dict[str, Any]:
    release, rules, selected = inputs.release, inputs.rules, inputs.selection
    claimed = {candidate.record.session for candidate in inputs.candidates}
    missing = set(release.sessions) - claimed
    forgotten = sorted(missing.union(selection.forgotten))
    dropped = {
        "sessions": dict(selection.dropped_sessions),
        "turns": dict(selection.dropped_turns + selection.turns_of_dropped),
    }
    if missing:
        dropped["sessions"]["forgotten"] = dropped["sessions"].get("forgotten", 0) + len(missing)
    return {
        "release": release.number,
        "chain": release.chain,
        "anchor": release.anchor,
        "inputs": {
            "rules": dataclasses.asdict(rules),
            "labeller": inputs.labeller,
            "judges": sorted({session.candidate.label.judge for session in selection.sessions}),
            "template": inputs.template,
            "claimed": len(release.sessions),
            "served_versions": served_versions(inputs.releases),
            "trainable_versions": sorted(selected.versions.versions),
            "longest_row": selected.longest_row,
            "route_shape": selected.route_shape,
            "sha256": {"labels": _hash_labels(selection.sessions), "tombstones": _hash(forgotten)},
        },
        "drops": {kind: _sum(inputs.before.get(kind, {}), dropped[kind]) for kind in ("sessions", "turns")},
        "monitors": measure_batch(selection.sessions, numbers),
        "sessions": [
            _row(session, numbers, number, turns)
            for number, (session, turns) in enumerate(zip(selection.sessions, numbers.turns, strict=True))
        ],
    }


def _row(session: SelectedSession, numbers: BatchNumbers, number: int, turns: Sequence[TurnNumbers]) -> dict[str, Any]:
    record, label = session.candidate.record, session.candidate.label
    reward = numbers.rewards[record.session]
    return {
        "session": record.session,
        "user": record.user,
        "repository": record.repository,
        "organisation": record.organisation,
        "opened": record.opened,
        "retention_days": session.candidate.retention_days,
        "bucket": label.bucket,
        "reward": reward.value,
        "terms": dict(reward.terms),
        "tokens": session.tokens,
        "weight": float(numbers.weights[number]),
        "turns": [
            {
                "turn": turn.id,
                "tokens": turn.tokens,
                "return": one.value,
                "baseline": one.baseline,
                "preference": one.preference,
                "advantage": one.advantage,
            }
            for turn, one in zip(session.turns, turns, strict=True)
        ],
    }


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {reason: one.get(reason, 0) + other.get(reason, 0) for reason in sorted({*one, *other})}


def _hash_labels(sessions: Sequence[SelectedSession]) -> str:
    digest = hashlib.sha256()
    for session in sessions:
        digest.update(json.dumps(dataclasses.asdict(session.candidate.label), sort_keys=True).encode())
    return digest.hexdigest()


def _hash(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def require_versions(candidates: Sequence[LabelledSession], chain: str, newest: int) -> None:
    """Raises UserError if a session was sampled by a version that a chain does not have: the traffic is of another.

    newest: the chain's last version.
    """
    for candidate in candidates:
        if (version := candidate.label.last_version) is not None and version > newest:
            raise UserError(
                f"session {candidate.record.session!r} was sampled by version {version}, and the newest version of "
                f"{chain} is {newest}: this is the traffic of another chain; give the --traffic of its servers."
            )
