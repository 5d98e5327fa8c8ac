"""Which versions a batch may learn from: the last that served all users, and none that was rolled back."""

import dataclasses
from collections.abc import Mapping, Sequence

from composer_jax.realtime.release.releases import Release
from composer_jax.serve.traffic.records import SessionRecord

IN_CANARY = ("canary", "held")


@dataclasses.dataclass(frozen=True)
class CanarySpan:
    """The time in which two versions served, by Unix seconds of the sessions' opening."""

    start: float
    stop: float
    arms: Mapping[str, frozenset[int]]
    """Arm -> the versions with the weights that served it."""


@dataclasses.dataclass(frozen=True)
class TrainableVersions:
    """The versions whose answers may be trained."""

    versions: frozenset[int]
    """Numbers with the same weights, of which a rollback makes one more, are all in it, or none is."""
    canaries: tuple[CanarySpan, ...] = ()

    def of_session(self, record: SessionRecord) -> frozenset[int]:
        """Returns the versions whose answers of a session may be trained.

        A session that opened in a canary has those of its own arm only: where servers changed their version under it,
        what became of it is not the work of one version. Without an arm it has none.
        """
        for span in self.canaries:
            if span.start <= record.opened < span.stop:
                return span.arms.get(record.arm, frozenset()) & self.versions
        return self.versions


def trainable_versions(releases: Sequence[Release], lag: int) -> TrainableVersions:
    """Returns the last 1 + lag versions that served all users, as the files of the releases say.

    A rollback publishes older weights under a new number; both numbers are one version here, and what served in
    between, or was the candidate, is none, until a later rollback goes back to it.
    """
    weights: dict[int, int] = {}
    """Version -> the oldest version with the same weights."""
    bad: set[int] = set()
    served = [releases[0].anchor] if releases else []
    for release in releases:
        for row in release.transitions:
            if row["state"] == "released" and release.version is not None:
                served.append(release.version)
            elif row["state"] == "rolled_back":
                bad = _rolled_back(release, row, served, weights, bad)
                served.append(row["as"])
    good = [version for one in reversed(served) if (version := weights.get(one, one)) not in bad]
    last = set(list(dict.fromkeys(good))[: 1 + lag])
    known = {*served, *weights}
    versions = frozenset(one for one in known if weights.get(one, one) in last)
    return TrainableVersions(versions, tuple(_canaries(releases, weights)))


def _rolled_back(
    release: Release, row: Mapping[str, object], served: Sequence[int], weights: dict[int, int], bad: set[int]
) -> set[int]:
    """Returns what is taken back after a rollback, of `bad` before it, and notes in `weights` what it published."""
    back = {release.version} - {None, release.anchor}
    rollback = release.rollback
    if rollback is None or row["as"] != rollback["as"]:
        return bad | {one for one in back if one is not None}  # an earlier one; the file has no more of it
    named: int = rollback["to"]
    to = weights.get(named, named)
    weights[rollback["as"]] = to
    roots = [weights.get(one, one) for one in served]
    after = roots[len(roots) - roots[::-1].index(to) :] if to in roots else []
    return {one for one in (*bad, *back, *after) if one is not None and one != to}


def _canaries(releases: Sequence[Release], weights: Mapping[int, int]) -> list[CanarySpan]:
    def same(version: int) -> frozenset[int]:
        root = weights.get(version, version)
        return frozenset((version, root, *(one for one, other in weights.items() if other == root)))

    spans = []
    for release in releases:
        rows = release.transitions
        first = next((i for i, row in enumerate(rows) if row["state"] == "canary"), None)
        if first is None or release.version is None:
            continue
        stop = next((row["time"] for row in rows[first:] if row["state"] not in IN_CANARY), float("inf"))
        arms = {"anchor": same(release.anchor), "candidate": same(release.version)}
        spans.append(CanarySpan(rows[first]["time"], stop, arms))
    return spans
