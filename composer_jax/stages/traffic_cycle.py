"""The cycle of releases: sessions become labels, a batch, a candidate, a gate, a canary, a release, and then the next.

    collecting -> labelled -> trained -> gated -> canary -> released -> (the next release) collecting

`advance` does the next transition of the last release, or says for what it waits. What is on disk says where a release
is, so a cycle that was killed goes on with the same command. A candidate that the gate refuses is rolled back, so that
weights and learner go on from the anchor.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.checkpoint.address import PATCHES_PREFIX
from composer_jax.errors import UserError
from composer_jax.realtime.batches.build import SessionsGone
from composer_jax.realtime.batches.store import SessionForgotten, read_batch
from composer_jax.realtime.labels.judge import FollowUpJudge, JudgeUnavailable, RuleJudge
from composer_jax.realtime.release.canary import ServerNotReady, read_service
from composer_jax.realtime.release.releases import ENDED, ReleaseFolder
from composer_jax.realtime.release.steps import canary_step, gate_step, in_state, provenance
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.stages.evaluate_version import evaluate_version
from composer_jax.stages.released_learner import LearnerCheckpoints
from composer_jax.stages.run import Run
from composer_jax.stages.traffic import label_traffic, rows_of_canary
from composer_jax.stages.traffic_batch import describe_progress, learner_rows, make_batch
from composer_jax.stages.traffic_update import (
    NothingLearned,
    learner_of,
    open_chain,
    require_learning_rate,
    traffic_hash,
    train_release,
)
from composer_jax.storage.workdir import read_run_config

LOOK_S = 300.0
"""Seconds from one look at what a cycle waits for to the next."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Servers, traffic and judge of a cycle."""

    folders: Sequence[TrafficFolder]
    """Traffic of all servers; each transition opens them anew, so that it has the policies of now."""
    servers: Sequence[str] = ()
    """Addresses of the candidate's servers, which must have a version before users get it."""
    router: str = ""
    """Address of the router, which knows errors and latency of both arms; "" without."""
    judge: FollowUpJudge = dataclasses.field(default_factory=RuleJudge)
    """Of follow-ups."""
    own_signals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name -> import path of a user's own signals."""
    skip_aa: bool = False
    """Whether the first release need not be an A/A test, of two arms with the same weights."""
    every_s: float = 0.0
    """Seconds from the beginning of a release to that of the next, at least."""
    clock: Callable[[], float] = time.time
    """Unix seconds."""


@dataclasses.dataclass(frozen=True)
class CycleStep:
    """What a call of `advance` did."""

    release: int
    state: str
    """After it."""
    waits_for: str
    """A sentence; "" after a transition."""

    @property
    def moved(self) -> bool:
        """Whether there was a transition."""
        return not self.waits_for

    def __str__(self) -> str:
        return f"release {self.release} is {self.state}" + (f": {self.waits_for}" if self.waits_for else "")


def advance(run: Run, folder: ReleaseFolder, deployment: Deployment) -> CycleStep:
    """Does the next transition of the last release, or says for what it waits.

    Raises:
      UserError: as the stages do whose transition it is; nothing is lost then.
    """
    # A cycle runs for weeks; an organisation may withdraw its consent, or shorten its retention, meanwhile.
    folders = [TrafficFolder(opened.path) for opened in deployment.folders]
    deployment = dataclasses.replace(deployment, folders=folders)
    if not folder.releases or folder.last.state in ENDED:
        waits_for = _begin(run, folder, deployment)
    else:
        waits_for = STEPS[folder.last.state](run, folder, deployment)
    return CycleStep(folder.last.number, folder.last.state, waits_for)


@contextlib.contextmanager
def open_releases(
    workdir: str | Path, *, by: str, config: Mapping[str, Any] | None = None, clock: Callable[[], float] = time.time
) -> Iterator[tuple[Run, ReleaseFolder]]:
    """Yields the run in a folder and its releases, whose one owner this process is meanwhile.

    config: that of the run, whose section "traffic" may differ from the one that it began with; None is the stored one.

    Raises:
      UserError: the folder is none of a run, its config is another one, or another process owns it.
    """
    stored = read_run_config(workdir)
    if stored is None:
        raise UserError(f"{workdir} has no config.json; give the folder of the run whose weights are released.")
    with Run(stored["config"] if config is None else config, workdir) as run:
        learner = lambda checkpoints: LearnerCheckpoints(checkpoints, run.workdir.holder)  # noqa: E731
        with ReleaseFolder(run.path, by=by, clock=clock, learner=learner) as folder:
            yield run, folder


def run_cycle(
    workdir: str | Path,
    deployment: Deployment,
    *,
    by: str,
    config: Mapping[str, Any] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Advances again and again, and prints each transition and each new sentence; ends only by an error.

    config: as of `open_releases`.

    While it sleeps, others may own the releases, such as a person who approves one.
    """
    shown = ""
    while True:
        with open_releases(workdir, by=by, config=config, clock=deployment.clock) as (run, folder):
            while True:
                step = advance(run, folder, deployment)
                if str(step) != shown:
                    shown = str(step)
                    print(shown, file=sys.stderr, flush=True)
                if not step.moved:
                    break
        sleep(LOOK_S)


def train_labelled(run: Run, folder: ReleaseFolder) -> int:
    """Trains the candidate of the release that is `labelled`, and records it; returns its version.

    Raises:
      NothingLearned: the release is `failed` then.
      UserError: the release is in another state, has no batch, or as `train_release` does.
    """
    release = in_state(folder, "labelled")
    try:
        version = train_release(run, release, read_batch(run.path, release.number))
    except NothingLearned as error:
        folder.move("failed", str(error))
        raise
    folder.record_candidate(version)
    return version


def gate_trained(run: Run, folder: ReleaseFolder, **rules: float) -> None:
    """Evaluates both versions of the release that is `trained`, and records the gate's verdict.

    rules: fields of GateRules in place of those of traffic.gate.

    Raises:
      UserError: the release is in another state, or as `evaluate_version` and `gate` do.
    """
    release, asked = in_state(folder, "trained"), dataclasses.replace(run.config.traffic.gate, **rules)
    if release.is_aa:
        gate_step(folder, None, None, asked)
        return
    assert release.version is not None
    gate_step(folder, evaluate_version(run, release.anchor), evaluate_version(run, release.version), asked)


# ---------------------------------------------------------------- one transition each; the sentence is "" after it


def _begin(run: Run, folder: ReleaseFolder, deployment: Deployment) -> str:
    last = folder.last if folder.releases else None
    if last is not None and last.state == "failed" and last.version is not None:
        folder.roll_back(f"the gate refused version {last.version}: {last.transitions[-1]['reason']}")
        return ""
    if last is not None:
        missing = last.transitions[0]["time"] + deployment.every_s - deployment.clock()
        if missing > 0:
            return f"it has ended, and the next one begins in {missing / 60:.0f} minutes"
    anchor = open_chain(run)
    require_learning_rate(run)
    hashes = provenance(str(run.path)) | {"traffic": traffic_hash(run)}
    begin = {"learner": learner_of(run), "hashes": hashes}
    if deployment.skip_aa or any(one.is_aa and one.state == "released" for one in folder.releases):
        folder.begin(run.config.rl.publish, anchor, **begin)
    else:
        folder.adopt(run.config.rl.publish, anchor, anchor, **begin)
    return ""


def _collect(run: Run, folder: ReleaseFolder, deployment: Deployment) -> str:
    rules = run.config.traffic.batch
    if sentence := _label(folder, deployment, rules.horizon_s):
        return sentence
    progress = make_batch(folder, run.path, deployment.folders, rules, learner_rows(run.path))
    return describe_progress(folder.last, progress, rules) if progress.missing else ""


def _train(run: Run, folder: ReleaseFolder, deployment: Deployment) -> str:
    # The first two leave the release `failed`, and the next one begins. If a user withdraws while it learns, it stays
    # `labelled`, and the next step trains the sessions that remain.
    with contextlib.suppress(SessionsGone, NothingLearned, SessionForgotten):
        # A process that was killed after it had claimed the sessions has left no batch.
        make_batch(folder, run.path, deployment.folders, run.config.traffic.batch, learner_rows(run.path))
        train_labelled(run, folder)
    return ""


def _gate(run: Run, folder: ReleaseFolder, deployment: Deployment) -> str:
    gate_trained(run, folder)
    return ""


def _start_canary(run: Run, folder: ReleaseFolder, deployment: Deployment) -> str:
    rules, skip_aa = run.config.traffic.canary, deployment.skip_aa
    try:
        canary_step(folder, (), rules, servers=deployment.servers, skip_aa=skip_aa, clock=deployment.clock)
    except ServerNotReady as error:
        return str(error)
    return ""


def _look(run: Run, folder: ReleaseFolder, deployment: Deployment) -> str:
    rules, transitions = run.config.traffic.canary, len(folder.last.transitions)
    unknown, service = [_label(folder, deployment, rules.horizon_s)], None
    try:
        service = read_service(deployment.router) if deployment.router else None
    except UserError as error:
        unknown.append(str(error))
    rows = rows_of_canary(deployment.folders, rules.horizon_s, folder.last)
    # What is known rolls a harmful candidate back, though the judge or the router is down.
    why = " ".join(filter(None, unknown))
    release, reason = canary_step(folder, rows, rules, service=service, unknown=why, clock=deployment.clock)
    return "" if len(release.transitions) > transitions else f"{release.fraction:.0%} of the users have it; {reason}"


def _wait_for_person(run: Run, folder: ReleaseFolder, deployment: Deployment) -> str:
    before, reason = folder.last.transitions[-2]["state"], folder.last.transitions[-1]["reason"]
    if before == "trained":
        return f"{reason}; `launch.traffic gate` with --approve=REASON or --refuse=REASON decides"
    return f"{reason}; `launch.traffic canary --approve=REASON` or `rollback --reason=REASON` decides"


STEPS: Mapping[str, Callable[[Run, ReleaseFolder, Deployment], str]] = {
    "collecting": _collect,
    "labelled": _train,
    "trained": _gate,
    "gated": _start_canary,
    "canary": _look,
    "held": _wait_for_person,
}
"""State of the last release -> what the cycle does then."""


def _label(folder: ReleaseFolder, deployment: Deployment, horizon: float) -> str:
    """Labels what is old enough; returns a sentence if the judge cannot be asked now, and ""."""
    checkpoint = f"{PATCHES_PREFIX}{folder.last.chain}"
    own, clock = deployment.own_signals, deployment.clock
    try:
        label_traffic(deployment.folders, horizon, checkpoint, deployment.judge, own, clock=clock)
    except UserError as error:
        if not isinstance(error.__cause__, JudgeUnavailable):
            raise
        return str(error)
    return ""
