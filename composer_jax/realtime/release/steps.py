"""One step of a release at a time: what `launch.traffic` does with the release that is open."""

import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.git import read_git
from composer_jax.realtime.release.canary import (
    CanaryRules,
    LabelRow,
    ServiceSample,
    decide,
    look,
    next_fraction,
    require_version,
)
from composer_jax.realtime.release.gate import GateRules, gate, read_evaluation
from composer_jax.realtime.release.releases import (
    Release,
    ReleaseFolder,
    arms_of,
    next_states,
    pinned_versions,
    served_versions,
)
from composer_jax.storage.workdir import read_run_config

EQUAL_WEIGHTS = {"verdict": "pass", "reasons": ["an A/A test: both arms have the same weights"]}


def in_state(folder: ReleaseFolder, state: str) -> Release:
    """Returns the last release. Raises a UserError if it is in another state."""
    release = folder.last
    if release.state != state:
        raise UserError(
            f"release {release.number} is {release.state}, and this is for one that is {state}; see status."
        )
    return release


def gate_step(
    folder: ReleaseFolder, anchor: str | Path | None, candidate: str | Path | None, rules: GateRules
) -> Release:
    """Tests the candidate of the release that is `trained`; returns the release, gated, held or failed.

    anchor, candidate: files of evaluations of both, whose hashes the release gets; an A/A test needs none.

    Raises:
      UserError: the release is in another state, or as `read_evaluation` and `gate` do.
    """
    release = in_state(folder, "trained")
    if release.is_aa:
        return folder.record_gate(EQUAL_WEIGHTS)
    if anchor is None or candidate is None:
        raise UserError("the gate needs --anchor and --candidate, stored evaluations of both versions.")
    read = {"anchor": read_evaluation(anchor), "candidate": read_evaluation(candidate)}
    result = gate(read["anchor"]["suites"], read["candidate"]["suites"], rules)
    return folder.record_gate(result | {"evaluations": {arm: one["sha256"] for arm, one in read.items()}})


def canary_step(
    folder: ReleaseFolder,
    rows: Sequence[LabelRow],
    rules: CanaryRules,
    *,
    servers: Sequence[str] = (),
    service: Mapping[str, ServiceSample] | None = None,
    unknown: str = "",
    skip_aa: bool = False,
    clock: Callable[[], float] = time.time,
) -> tuple[Release, str]:
    """Starts the canary of a gated release, or looks at the one that runs; returns the release and what was decided.

    Args:
      rows: all labels of this release's canary so far; those of its other steps are left out.
      servers: addresses of the candidate's servers, which must answer its version before it starts.
      service: as of `look`.
      unknown: why labels or `service` cannot be had now; the canary is held or rolled back then, but does not go on.
      skip_aa: starts without an A/A test in this folder before.

    Raises:
      UserError: the release is in another state, no A/A test was released, or a server has another version.
    """
    release = folder.last
    if release.state == "gated":
        return _start(folder, servers, skip_aa), "the canary starts"
    release = in_state(folder, "canary")
    rows = [row for row in rows if row.fraction == release.fraction]
    # Only a person's approval leads from a hold back to the canary.
    approved = {name for before in release.canary if before["decision"] == "hold" for name in before["held_by"]}
    seen = look(rows, rules, is_aa=release.is_aa, service=service, approved=approved)
    now = clock()
    decision, reason = decide(seen, rules, now - release.transitions[-1]["time"])
    if unknown and decision in ("wait", "advance"):
        decision, reason = "wait", unknown
    seen = {"time": now, "fraction": release.fraction, **seen, "decision": decision, "reason": reason}
    if decision == "wait":
        return folder.note_look(seen), reason
    if decision == "hold":
        return folder.move("held", reason, look=seen), reason
    if decision == "roll back":
        return folder.roll_back(reason, look=seen), reason
    fraction = next_fraction(release.fraction, is_aa=release.is_aa)
    if fraction is None:
        return folder.move("released", reason, look=seen, fraction=1.0), reason
    return folder.move("canary", reason, look=seen, fraction=fraction), reason


def approve(folder: ReleaseFolder, reason: str) -> Release:
    """Lets a held release go on where it was held, because a person says so."""
    release = in_state(folder, "held")
    before = release.transitions[-2]["state"]
    return folder.move("gated" if before == "trained" else "canary", reason, fraction=release.fraction)


def refuse(folder: ReleaseFolder, reason: str) -> Release:
    """Ends a release that the gate has held or not seen yet, because a person says so.

    Raises:
      UserError: it has passed the gate, or has ended.
    """
    release = folder.last
    if "failed" not in next_states(release):
        held = "held in its canary" if release.state == "held" else release.state
        out = "; roll it back" if "rolled_back" in next_states(release) else ""
        raise UserError(
            f"release {release.number} is {held}, and --refuse is for one that has not passed the gate{out}."
        )
    return folder.move("failed", reason)


def provenance(run: str | None) -> dict[str, str]:
    """Returns what a release depends on beside weights: {"code"} and, of a run, {"config"}.

    The code is the commit of a checkout, and the version of an installed package.

    Raises:
      UserError: `run` is not the folder of a run.
    """
    root = Path(__file__).parents[3]
    if (root / ".git").exists():
        code = read_git("rev-parse", "HEAD", cwd=root).decode().strip()
    else:
        code = importlib.metadata.version("composer_jax")
    if run is None:
        return {"code": code}
    record = read_run_config(run)
    if record is None:
        raise UserError(f"{run} has no config.json; give the folder of a run.")
    return {"code": code, "config": record["config_hash"]}


def status(releases: Sequence[Release]) -> dict[str, Any]:
    """Returns what a person wants to see of the releases, as plain JSON: versions, states, gates and canaries."""
    if not releases:
        return {"releases": []}
    return {
        "serving": served_versions(releases)[-1],
        "arms": arms_of(releases),
        "pinned": sorted(pinned_versions(releases)),
        "releases": [_summary(release) for release in releases],
    }


def _summary(release: Release) -> dict[str, Any]:
    gate_result = release.gate or {}
    suites = gate_result.get("suites", {})
    return {
        "release": release.number,
        "state": release.state,
        "anchor": release.anchor,
        "version": release.version,
        "fraction": release.fraction,
        "sessions": len(release.sessions),
        "restored_as": release.rollback["as"] if release.rollback else None,
        "gate": {
            "verdict": gate_result.get("verdict"),
            "reasons": gate_result.get("reasons", []),
            "suites": {
                name: {key: row[key] for key in ("mean", "lower", "tasks", "passed")} for name, row in suites.items()
            },
        },
        "canary": [
            {key: seen[key] for key in ("time", "fraction", "users", "candidates", "metrics", "decision", "reason")}
            for seen in release.canary
        ],
        "transitions": list(release.transitions),
    }


def _start(folder: ReleaseFolder, servers: Sequence[str], skip_aa: bool) -> Release:
    release = folder.last
    tested = any(one.is_aa and one.state == "released" for one in folder.releases)
    if not (release.is_aa or tested or skip_aa):
        raise UserError(
            "no A/A test has been released here, which shows that users are assigned as they should be; begin a "
            f"release with --version={release.anchor} first, or give --skip_aa."
        )
    assert release.version is not None
    require_version(servers, release.version)
    fraction = next_fraction(0.0, is_aa=release.is_aa)
    assert fraction is not None
    return folder.move("canary", f"{len(servers)} servers have version {release.version}", fraction=fraction)
