"""Releases: one file per release of weights, which says how far it is, what was decided, when and by whom.

    WORKDIR/releases/0003.json     one release; replaced atomically at every transition
    WORKDIR/releases/.lock         locked by the one process that may change releases

    collecting -> labelled -> trained -> gated -> canary -> released

with the side exits held (a person decides), failed (the gate refuses) and rolled_back. A release of two versions that
exist already begins at `trained`. Everything around the files follows from them: which versions are pinned in the chain
of weights, which version each arm serves, and what is left to do after a crash (`ReleaseFolder.reconcile`).
"""

import contextlib
import dataclasses
import json
import os
import re
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from absl import logging

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.pinned_versions import pin_versions, read_manifest, restore_version, weights_hash
from composer_jax.checkpoint.weight_chain import ARMS, ChainFiles
from composer_jax.errors import UserError
from composer_jax.realtime.release.canary import next_fraction
from composer_jax.storage.workdir import lock_folder

FORMAT = 1
FOLDER = "releases"
NEXT: Mapping[str, tuple[str, ...]] = {
    "collecting": ("labelled", "failed"),
    "labelled": ("trained", "failed"),
    "trained": ("gated", "held", "failed"),
    "gated": ("canary", "rolled_back"),
    "canary": ("canary", "released", "held", "rolled_back"),
    "held": ("gated", "canary", "failed", "rolled_back"),
    "released": ("rolled_back",),
    "failed": ("rolled_back",),
    "rolled_back": ("rolled_back",),
}
"""State -> states that may follow it. From `held` on it depends on the state before (`next_states`)."""
ENDED = ("released", "failed", "rolled_back")
KEPT_RELEASES = 2
"""The last versions that served all users, which stay pinned: one may go when two later ones have followed it."""
MOST_WAITS = 200
"""Looks at a canary that decided nothing, of which the last ones are kept: every look writes the whole file."""


@dataclasses.dataclass(frozen=True)
class Release:
    """One release, as its file says."""

    number: int
    chain: str
    """Folder or URL of the versions (checkpoint/weight_chain.py)."""
    anchor: int
    """The version that serves all users before it."""
    salt: str
    """Of the arms' hash, so that every release draws other users."""
    version: int | None = None
    """The candidate; None before it is trained."""
    fraction: float = 0.0
    """Of the users that have the candidate."""
    transitions: tuple[Mapping[str, Any], ...] = ()
    """{"state", "time" in Unix seconds, "by", "reason"}, in order; a canary has its "fraction", and a rollback the
    version "as" which it published the older one."""
    hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of the weights of both versions (`weights_hash`), and what the caller names: config, commit."""
    sessions: tuple[str, ...] = ()
    """Sessions of production traffic that it learns from. No other release has any of them."""
    gate: Mapping[str, Any] | None = None
    """The gate's verdict and table."""
    canary: tuple[Mapping[str, Any], ...] = ()
    """What looks at the canary saw: all that decided something, and the last MOST_WAITS others."""
    rollback: Mapping[str, Any] | None = None
    """{"to": VERSION, "as": VERSION, "reason", "is_published"}: written before anything is undone, so that it goes on
    after a crash."""
    learner: str = ""
    """The learner's checkpoints, which go back with the weights; "" without."""

    @property
    def state(self) -> str:
        """The last state."""
        return self.transitions[-1]["state"]

    @property
    def is_open(self) -> bool:
        """Whether it goes on; one that is being rolled back does."""
        return self.state not in ENDED or self.is_rolling_back

    @property
    def is_rolling_back(self) -> bool:
        """Whether a rollback was begun that is not done."""
        return self.rollback is not None and self.transitions[-1].get("as") != self.rollback["as"]

    @property
    def is_aa(self) -> bool:
        """Whether both arms have the same weights, which tests the assignment of users and not the weights."""
        return self.version == self.anchor

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values, from which `read_releases` makes an equal release."""
        return {"format": FORMAT, "state": self.state, **dataclasses.asdict(self)}


class LearnerStates(Protocol):
    """The learner's states of versions, weights and optimizer, which a release keeps and goes back to."""

    def keep(self, versions: Iterable[int]) -> None:
        """Keeps the states of these versions, where the learner still has them, and drops all others."""
        ...

    def has(self, version: int) -> bool:
        """Returns whether the state of a version is kept."""
        ...

    def restore(self, version: int, as_version: int) -> None:
        """Makes the state of `version` the one that the learner goes on from, as that of `as_version`; may repeat."""
        ...


def read_releases(workdir: str | Path) -> list[Release]:
    """Returns the releases in a folder, in order; another process may be changing them.

    Raises:
      UserError: a file is damaged or of another format.
    """
    folder = Path(workdir).expanduser() / FOLDER
    files = sorted(file for file in folder.glob("*.json") if re.fullmatch(r"\d{4,}\.json", file.name))
    return [_read(file) for file in files]


def served_versions(releases: Sequence[Release]) -> list[int]:
    """Returns the versions that have served all users, in order; the first is the anchor of the first release."""
    served = [releases[0].anchor] if releases else []
    for release in releases:
        if release.version is not None and any(row["state"] == "released" for row in release.transitions):
            served.append(release.version)
        served += [row["as"] for row in release.transitions if row["state"] == "rolled_back"]
    return [version for i, version in enumerate(served) if i == 0 or served[i - 1] != version]


def pinned_versions(releases: Sequence[Release]) -> set[int]:
    """Returns the versions that must stay: those of open releases, and of the last that served all users."""
    pinned = set(served_versions(releases)[-KEPT_RELEASES:])
    for release in releases:
        if release.is_open:
            pinned |= {release.anchor} | ({release.version} if release.version is not None else set())
        if release.is_rolling_back and (rollback := release.rollback):
            pinned |= {rollback["to"], *([rollback["as"]] if rollback["is_published"] else [])}
    return pinned


def arms_of(releases: Sequence[Release]) -> dict[str, int]:
    """Returns what the servers of each arm serve: {"anchor", "candidate"}."""
    last = releases[-1]
    serving = served_versions(releases)[-1]
    if last.is_rolling_back and last.rollback and last.rollback["is_published"]:
        return {"anchor": last.rollback["as"], "candidate": last.rollback["as"]}
    if last.version is not None and (last.state in ("gated", "canary") or _held_from(last) == "canary"):
        return {"anchor": last.anchor, "candidate": last.version}
    return {"anchor": serving, "candidate": serving}


class ReleaseFolder:
    """The releases of a folder, of which this process is the one owner; use it in a `with` block.

    Opening it does what a process that was killed has left undone.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        by: str,
        clock: Callable[[], float] = time.time,
        learner: Callable[[str], LearnerStates] | None = None,
        leaves_learner: bool = False,
    ) -> None:
        """
        Args:
          by: who decides, for the records: a person's or a program's name.
          learner: a learner's checkpoints -> its states; needed where releases name a learner.
          leaves_learner: rollbacks leave the learner as it is, because its states are lost.

        Raises:
          UserError: another process owns the releases, a file is damaged, or the learner of a rollback that was begun
            cannot go back.
        """
        self.path = Path(workdir).expanduser() / FOLDER
        self._by, self.clock, self._learner, self._leaves_learner = by, clock, learner, leaves_learner
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create {self.path}: {error.strerror}; choose another --workdir.") from error
        self._lock = lock_folder(self.path, f"{os.getpid()} {uuid.uuid4().hex[:8]}")
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for left in self.path.glob(".*.json.*"):  # of a process that was killed while it wrote
                left.unlink()
            self.releases = read_releases(workdir)
            self.resumed_rollback = bool(self.releases) and self.last.is_rolling_back
            """Whether opening it ended a rollback that an earlier process had begun."""
            self.reconcile()
            stack.pop_all()

    def close(self) -> None:
        """Lets another process own the releases."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def last(self) -> Release:
        """The last release. Raises UserError if there is none."""
        if not self.releases:
            raise UserError(f"{self.path} has no release; begin one.")
        return self.releases[-1]

    # ---------------------------------------------------------------- the way forward

    def begin(
        self, chain: str, anchor: int | None = None, *, learner: str = "", hashes: Mapping[str, str] | None = None
    ) -> Release:
        """Begins a release whose candidate is yet to be trained, at `collecting`.

        Args:
          anchor: the version that serves now; None is the one that the last release left.
          hashes: of what else the release depends on, such as {"config", "commit"}.

        Raises:
          UserError: another release is open, the chain lacks the anchor or is released from another folder, or the
            learner has no state of the anchor.
        """
        return self._write(self._new(chain, anchor, learner, hashes), "collecting", "")

    def adopt(
        self,
        chain: str,
        version: int,
        anchor: int | None = None,
        *,
        learner: str = "",
        hashes: Mapping[str, str] | None = None,
    ) -> Release:
        """Begins a release of a version that exists, at `trained`; equal versions make an A/A test.

        Arguments and errors are those of `begin`; the version must be above the anchor, or equal to it.
        """
        release = self._new(chain, anchor, learner, hashes)
        return self._write(self._with_candidate(release, version), "trained", "a version that existed")

    def claim(self, sessions: Iterable[str], most: int | None = None) -> tuple[str, ...]:
        """Takes sessions that no release has, for the one that collects; it is `labelled` then. Returns them.

        sessions: labelled ones, in the order of preference. most: how many it takes at most; None is all.
        """
        taken = {session for release in self.releases for session in release.sessions}
        free = tuple(dict.fromkeys(session for session in sessions if session not in taken))[:most]
        if not free:
            raise UserError("no release lacks any of these sessions; wait until more of them are labelled.")
        self._write(dataclasses.replace(self.last, sessions=free), "labelled", f"{len(free)} sessions")
        return free

    def record_candidate(self, version: int) -> Release:
        """Records the candidate that was trained and published."""
        return self._write(self._with_candidate(self.last, version), "trained", "")

    def record_gate(self, result: Mapping[str, Any]) -> Release:
        """Records what the gate said: the release is `gated`, `held` or `failed`."""
        state = {"pass": "gated", "hold": "held", "fail": "failed"}[result["verdict"]]
        reason = "; ".join(result["reasons"]) or "every suite and monitor passes"
        return self._write(dataclasses.replace(self.last, gate=dict(result)), state, reason)

    def move(self, state: str, reason: str, *, look: Mapping[str, Any] | None = None, fraction: float = 0.0) -> Release:
        """Moves the last release to another state; a canary has a fraction, and any may have what a look saw."""
        looks = (*self.last.canary, *([look] if look is not None else []))
        if state == "held":
            fraction = self.last.fraction  # users keep their arms until a person has decided
        return self._write(dataclasses.replace(self.last, canary=looks, fraction=fraction), state, reason)

    def note_look(self, look: Mapping[str, Any]) -> Release:
        """Records what a look at the canary saw, which changes nothing else."""
        waits = [i for i, seen in enumerate(self.last.canary) if seen["decision"] == "wait"]
        oldest = set(waits[: len(waits) + 1 - MOST_WAITS]) if len(waits) >= MOST_WAITS else set()
        looks = [seen for i, seen in enumerate(self.last.canary) if i not in oldest]
        return self._store(dataclasses.replace(self.last, canary=(*looks, look)))

    # ---------------------------------------------------------------- the way back

    def roll_back(self, reason: str, to: int | None = None, *, look: Mapping[str, Any] | None = None) -> Release:
        """Publishes the weights of an older version as a new one for both arms; the learner goes back to them, too.

        to: the version; None is the release's anchor. look: what the canary saw.

        Raises:
          UserError: no user has the last release's candidate, the version has not served all users or cannot be
            restored, or the learner cannot go back to it, which all users have done then.
        """
        last = self.last
        if "rolled_back" not in next_states(last):
            raise UserError(f"release {last.number} is {last.state}; there is nothing to roll back{_way_to_end(last)}.")
        to = last.anchor if to is None else to
        if to not in (served := served_versions(self.releases)):
            raise UserError(
                f"version {to} has not served all users; roll back to one that has: {', '.join(map(str, served))}."
            )
        read_manifest(ChainFiles(last.chain), to)
        looks = (*last.canary, *([look] if look is not None else []))
        intent = {"to": to, "as": _next_version(last.chain), "reason": reason, "is_published": False}
        self._pin([*self.releases[:-1], dataclasses.replace(last, rollback=intent)])
        self._store(dataclasses.replace(last, rollback=intent, canary=looks))
        return self._finish_rollback()

    def reconcile(self) -> None:
        """Does what the last release's file asks for and a killed process has not done; harmless if nothing is left."""
        if not self.releases:
            return
        last = self.last
        if last.is_rolling_back:
            self._finish_rollback()
        elif last.state == "labelled":
            # Died between the publication of the candidate and this file: the manifest names the release.
            manifests = ChainFiles(last.chain).manifests()
            labelled = (v for v, row in manifests.items() if row.get("release") == last.number and v > last.anchor)
            if (candidate := max(labelled, default=None)) is not None:
                self.record_candidate(candidate)
        self._follow()
        try:
            self._keep_states()
        except UserError as error:  # a release can go on or back without them
            logging.warning("%s", error)

    # ---------------------------------------------------------------- inside

    def _new(self, chain: str, anchor: int | None, learner: str, hashes: Mapping[str, str] | None) -> Release:
        if self.releases and self.last.is_open:
            way = _way_to_end(self.last) or "; release it or roll it back"
            raise UserError(f"release {self.last.number} is {self.last.state}{way} before another begins.")
        serving = served_versions(self.releases)[-1] if self.releases else anchor
        if serving is None:
            raise UserError("the first release needs --serving, the version that serves now.")
        if anchor not in (None, serving):
            raise UserError(f"version {serving} serves now, not {anchor}; leave --serving out, or roll back.")
        chain = chain if "://" in chain else str(Path(chain).expanduser().absolute())
        if self.releases and chain != self.last.chain:
            raise UserError(f"the releases are of versions in {self.last.chain}, not {chain}; use another --workdir.")
        number = self.last.number + 1 if self.releases else 1
        learner = str(Path(learner).expanduser().absolute()) if learner else ""
        hashes = {"anchor": weights_hash(chain, serving), **(hashes or {})}
        return Release(number, chain, serving, secrets.token_hex(8), hashes=hashes, learner=learner)

    def _with_candidate(self, release: Release, version: int) -> Release:
        if version < release.anchor:
            raise UserError(
                f"version {version} is older than the anchor {release.anchor}, and servers take versions that rise; "
                "publish it as a newer version, or roll back."
            )
        hashes = {**release.hashes, "weights": weights_hash(release.chain, version)}
        return dataclasses.replace(release, version=version, hashes=hashes)

    def _write(self, release: Release, state: str, reason: str) -> Release:
        """Writes a release in its next state, and does what follows from it."""
        is_new = not self.releases or release.number != self.last.number
        if not is_new and state not in (following := next_states(self.last)):
            raise UserError(
                f"release {release.number} is {release.state}, from which it cannot become {state}; it can become "
                f"{', '.join(following) or 'nothing else'}."
            )
        if state == "gated" and release.gate is None:
            raise UserError(f"release {release.number} has not been through the gate, so it cannot become gated.")
        if state == "rolled_back" and not release.is_rolling_back:
            raise UserError(f"release {release.number} becomes rolled_back by roll_back, which restores its weights.")
        row: dict[str, Any] = {"state": state, "time": self._now(state), "by": self._by, "reason": reason}
        if state == "canary":
            row["fraction"] = release.fraction
        if state == "rolled_back" and release.rollback:
            row["as"] = release.rollback["as"]
        release = dataclasses.replace(release, transitions=(*release.transitions, row))
        others = self.releases if is_new else self.releases[:-1]
        # Before the file: no publisher may delete what the file names.
        self._pin([*others, release])
        if is_new:
            self._require_state([*others, release])
        self._store(release)
        self._follow()
        if not is_new:  # users do not wait for a learner, whose states may be lost
            self._keep_states()
        return release

    def _now(self, state: str) -> float:
        now = self.clock()
        times = [row["time"] for release in self.releases for row in release.transitions]
        if times and now < max(times):
            if state == "rolled_back":  # users do not wait for a clock to be set right
                return max(times)
            raise UserError(
                f"the clock says {now:.0f}, which is {max(times) - now:.0f} s before the last transition; set it right."
            )
        return now

    def _store(self, release: Release) -> Release:
        content = json.dumps(release.to_json(), indent=1) + "\n"
        write_atomically(self.path / f"{release.number:04d}.json", content.encode())
        if self.releases and self.releases[-1].number == release.number:
            self.releases[-1] = release
        else:
            self.releases.append(release)
        return release

    def _pin(self, releases: Sequence[Release]) -> None:
        """Pins the weights that the releases as they are and as they will be need."""
        pins = pinned_versions(releases) | (pinned_versions(self.releases) if self.releases else set())
        pin_versions(releases[-1].chain, pins, str(self.path.parent.absolute()))

    def _require_state(self, releases: Sequence[Release]) -> None:
        """Keeps the learner's states for a new release. Raises UserError if there is none of its anchor."""
        new = releases[-1]
        if (states := self._learner_of(new)) is None:
            return
        states.keep(pinned_versions(releases))
        if not states.has(new.anchor):
            raise UserError(
                f"the learner {new.learner} has no state of version {new.anchor}, to which it could not go back; "
                "name a version that it has saved (rl.save_every), or begin the release without --learner."
            )

    def _keep_states(self) -> None:
        """Keeps the learner's states of the pinned versions. Raises a UserError that says how far the release is."""
        last = self.last
        try:
            if states := self._learner_of(last):
                states.keep(pinned_versions(self.releases))
        except (UserError, OSError) as error:
            raise UserError(
                f"release {last.number} is {last.state}, but the learner's states were not kept: {error}"
            ) from error

    def _follow(self) -> None:
        """Makes pins of weights and arms those that the files ask for."""
        last = self.last
        arms = json.dumps(arms_of(self.releases)).encode()
        files = ChainFiles(last.chain)
        try:
            current = files.read(ARMS)
        except FileNotFoundError:
            current = b""
        if current != arms:
            files.write(ARMS, arms)
        pin_versions(last.chain, pinned_versions(self.releases), str(self.path.parent.absolute()))

    def _learner_of(self, release: Release) -> LearnerStates | None:
        if not release.learner:
            return None
        if self._learner is None:
            raise UserError(f"release {release.number} has the learner {release.learner}, which cannot be opened.")
        return self._learner(release.learner)

    def _finish_rollback(self) -> Release:
        last = self.last
        assert last.rollback is not None
        manifests, rollback = ChainFiles(last.chain).manifests(), dict(last.rollback)
        to, as_version = rollback["to"], rollback["as"]
        if manifests.get(as_version, {}).get("restores") != to and as_version <= max(manifests):
            rollback["as"] = as_version = _next_version(last.chain)  # a trainer has published meanwhile
            rollback["is_published"] = False
            last = self._store(dataclasses.replace(last, rollback=rollback))
        restore_version(last.chain, to, as_version, {"release": last.number})
        last = self._store(dataclasses.replace(last, rollback={**rollback, "is_published": True}))
        self._follow()  # users have the older weights even if the learner cannot go back
        reason = f"version {as_version} has the weights of version {to}: {rollback['reason']}"
        if last.learner and self._leaves_learner:
            last, reason = dataclasses.replace(last, learner=""), f"{reason}; the learner stays as it was"
        try:
            if states := self._learner_of(last):
                states.keep(pinned_versions(self.releases))
                states.restore(to, as_version)
        except (UserError, OSError) as error:
            raise UserError(
                f"all users have version {as_version}, with the weights of version {to}, but the learner has not gone "
                f"back: {error} The next command tries it again; launch.traffic rollback --leave_learner goes on "
                "without it."
            ) from error
        return self._write(dataclasses.replace(last, fraction=0.0), "rolled_back", reason)


def _held_from(release: Release) -> str | None:
    """Returns the state before `held`; None if the release is not held."""
    return release.transitions[-2]["state"] if release.state == "held" else None


def _way_to_end(release: Release) -> str:
    """Returns the way out of a release that has not passed the gate, as a part of a sentence; "" for others."""
    return "; end it with gate --refuse=REASON" if "failed" in next_states(release) else ""


def _next_version(chain: str) -> int:
    """Returns a number above all versions, also above one that a trainer is writing."""
    return max(ChainFiles(chain).versions(is_complete=False)) + 1


def next_states(release: Release) -> tuple[str, ...]:
    """Returns the states that may follow that of a release."""
    if release.is_rolling_back:
        return ("rolled_back",)
    before = _held_from(release)
    if release.state == "canary" and next_fraction(release.fraction, is_aa=release.is_aa) is not None:
        return tuple(state for state in NEXT["canary"] if state != "released")
    if before is None:
        return NEXT[release.state]
    return ("gated", "failed") if before == "trained" else ("canary", "rolled_back")


def _read(file: Path) -> Release:
    try:
        content = json.loads(file.read_bytes())
        if content.pop("format") != FORMAT:
            raise UserError(f"{file} is a release of another format than {FORMAT}; use the program that wrote it.")
        content.pop("state")
        for name in ("transitions", "sessions", "canary"):
            content[name] = tuple(content[name])
        release = Release(**content)
        if [row["state"] for row in release.transitions[:1]] not in (["collecting"], ["trained"]):
            raise ValueError("it does not begin at collecting or trained")
        return release
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not the file of a release ({error}); restore it from a copy.") from error
