"""The batch of the release that collects: labelled sessions of a workdir's traffic, claimed and written as groups."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.checkpoint.address import PATCHES_PREFIX
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.weight_chain import ChainFiles
from composer_jax.errors import UserError
from composer_jax.realtime.batches.advantages import weigh_sessions
from composer_jax.realtime.batches.build import BatchInputs, SessionsGone, build_batch, require_versions
from composer_jax.realtime.batches.rules import BatchRules
from composer_jax.realtime.batches.selection import LabelledSession, Selection, SelectionRules, select_sessions
from composer_jax.realtime.batches.store import batch_folder, has_batch, note_claim, read_batch, read_claim
from composer_jax.realtime.batches.versions import trainable_versions
from composer_jax.realtime.labels.label_sessions import LABELLER_VERSION
from composer_jax.realtime.labels.store import LabelStore
from composer_jax.realtime.release.releases import Release, ReleaseFolder
from composer_jax.schema.run_config import run_config
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.policy import text_fingerprint
from composer_jax.stages.traffic import forget_in_batches
from composer_jax.storage.workdir import read_run_config


@dataclasses.dataclass(frozen=True)
class LearnerRows:
    """What the learner of a batch takes."""

    longest: int | None = None
    """Ids of its longest row; None has no limit."""
    route_shape: tuple[int, int] | None = None
    """(expert layers, experts per token) where it replays routes."""


@dataclasses.dataclass(frozen=True)
class BatchProgress:
    """How far the batch of a release is."""

    sessions: int
    """Those that can be trained, or that the release has claimed."""
    missing: int
    """Sessions that are still needed; 0 where the batch is there."""
    manifest: Mapping[str, Any] | None
    """Of the batch without the rows of sessions; None while sessions are missing."""


def learner_rows(workdir: str | Path) -> LearnerRows:
    """Returns what the learner of a run takes, as its config says; no limits in a folder without a run."""
    stored = read_run_config(workdir)
    if stored is None:
        return LearnerRows()
    config = run_config(stored["config"])
    return LearnerRows(config.rl.batches[-1][0], config.rl.route_shape(config.model))


def rules_of_run(workdir: str | Path) -> BatchRules:
    """Returns traffic.batch of a run's config; the defaults in a folder without a run."""
    stored = read_run_config(workdir)
    return BatchRules() if stored is None else run_config(stored["config"]).traffic.batch


def make_batch(
    folder: ReleaseFolder,
    workdir: str | Path,
    traffic: Sequence[TrafficFolder],
    rules: BatchRules,
    rows: LearnerRows | None = None,
) -> BatchProgress:
    """Claims the sessions of the release that collects, and writes its batch; with too few it changes nothing.

    A call after a process was killed between the two writes the batch of the claimed sessions; a call with a batch
    that is there returns it. Sessions that were forgotten, or are too old, leave earlier batches.

    Raises:
      UserError: no release collects, the labels are of several labellers or of another one than this program has, the
        traffic is of another chain, or as `weigh_sessions` does. The release has not changed then.
      SessionsGone: fewer than two of the claimed sessions are left. The release is `failed` then.
    """
    release, rows = folder.last, rows or LearnerRows()
    if release.state not in ("collecting", "labelled"):
        raise UserError(
            f"release {release.number} is {release.state}, and a batch is for one that collects; begin another release "
            "(launch.traffic begin without --version) when it has ended."
        )
    if release.state == "collecting" and has_batch(workdir, release.number):
        raise UserError(
            f"release {release.number} collects, and {batch_folder(workdir, release.number)} has a batch of it: "
            "restore the release's file of after its sessions were claimed, or move that folder away."
        )
    forget_in_batches(workdir, traffic, folder.clock())
    if has_batch(workdir, release.number):
        return _progress_of(workdir, release.number)
    versions = trainable_versions(folder.releases, rules.lag)
    held_to = SelectionRules(rules.horizon_s, versions, rows.longest, rows.route_shape)
    if release.state == "collecting":
        selection, labeller = _select_free(folder, traffic, rules, held_to)
        count = len(selection.sessions)
        if count < rules.min_sessions:
            return BatchProgress(count, rules.min_sessions - count, None)
        weigh_sessions(selection.sessions, rules)  # before the claim, so that caps that leave nothing change nothing
        before = {"sessions": selection.dropped_sessions, "turns": selection.turns_of_dropped}
        note_claim(workdir, release.number, {"labeller": labeller, "dropped": before})
        folder.claim([session.candidate.record.session for session in selection.sessions])
    return _build(folder, workdir, traffic, rules, held_to)


def _build(
    folder: ReleaseFolder,
    workdir: str | Path,
    traffic: Sequence[TrafficFolder],
    rules: BatchRules,
    held_to: SelectionRules,
) -> BatchProgress:
    """Writes the batch of the sessions that the last release has claimed."""
    release, noted = folder.last, read_claim(workdir, folder.last.number)
    labeller = noted.get("labeller") or _newest_labeller(traffic, rules.horizon_s)
    claimed = set(release.sessions)
    candidates = _candidates(traffic, rules.horizon_s, labeller, lambda session: session in claimed)
    inputs = BatchInputs(
        release=release,
        releases=folder.releases,
        candidates=candidates,
        rules=rules,
        selection=held_to,
        labeller=labeller,
        template=_template(traffic),
        before=noted.get("dropped", {}),
    )
    try:
        build_batch(workdir, inputs)
    except SessionsGone as error:
        folder.move("failed", str(error))
        raise
    # What was forgotten after it was read: the command that forgot it has not found the batch, which was not there yet.
    forget_in_batches(workdir, traffic)
    return _progress_of(workdir, release.number)


def _progress_of(workdir: str | Path, number: int) -> BatchProgress:
    """Returns that of a batch that is there."""
    manifest = read_batch(workdir, number).manifest
    shown = {name: value for name, value in manifest.items() if name != "sessions"}
    return BatchProgress(len(manifest["sessions"]), 0, shown)


def _select_free(
    folder: ReleaseFolder, traffic: Sequence[TrafficFolder], rules: BatchRules, held_to: SelectionRules
) -> tuple[Selection, str]:
    """Returns what can be trained of the labelled sessions that no release has claimed, and their labeller."""
    _require_template(_template(traffic), folder.last.chain)
    labeller = _newest_labeller(traffic, rules.horizon_s)
    taken = {session for release in folder.releases for session in release.sessions}
    candidates = _candidates(traffic, rules.horizon_s, labeller, lambda session: session not in taken)
    chain = folder.last.chain
    require_versions(candidates, chain, max(ChainFiles(chain).versions(is_complete=False), default=-1))
    return select_sessions(candidates, held_to), labeller


def _candidates(
    traffic: Sequence[TrafficFolder], horizon: float, labeller: str, is_wanted: Callable[[str], bool]
) -> list[LabelledSession]:
    """Returns the wanted sessions that have a label, in the order of their opening."""
    found: dict[str, LabelledSession] = {}
    for folder in traffic:
        records = {record.session: record for record in folder.sessions()}
        if twice := records.keys() & found.keys():
            raise UserError(
                f"session {min(twice)!r} is in two folders of traffic; let the router choose the server of a user."
            )
        organisations = folder.policy.organisations
        with contextlib.closing(open_database(folder.path)) as database:
            labels = LabelStore(database).read(horizon, labeller, is_wanted=is_wanted) if labeller else []
        for label in labels:
            if record := records.get(label.session):
                organisation = organisations.get(record.organisation)
                consent = organisation.consent if organisation else None
                days = folder.policy.retention_days
                found[label.session] = LabelledSession(label, record, folder, consent, days)
    return sorted(found.values(), key=lambda one: (one.record.opened, one.record.session))


def _newest_labeller(traffic: Sequence[TrafficFolder], horizon: float) -> str:
    """Returns the labeller of the newest labels; "" without labels.

    Raises UserError for folders with different ones, and for one of another version of this program.
    """
    by_folder: dict[str, str] = {}
    for folder in traffic:
        with contextlib.closing(open_database(folder.path)) as database:
            if labeller := LabelStore(database).newest_labeller(horizon):
                by_folder[str(folder.path)] = labeller
    labellers = sorted(set(by_folder.values()))
    if len(labellers) > 1:
        listed = ", ".join(f"{labeller} in {path}" for path, labeller in by_folder.items())
        raise UserError(
            f"the newest labels of {horizon:g} s are of different labellers ({listed}); label all folders with the "
            "same judge, signals and checkpoint (launch.traffic label)."
        )
    for labeller in labellers:
        if labeller.partition("-")[0] != str(LABELLER_VERSION):
            raise UserError(
                f"the newest labels of {horizon:g} s are of labeller {labeller}, and this program has version "
                f"{LABELLER_VERSION}; label again (launch.traffic label)."
            )
    return labellers[0] if labellers else ""


def _template(traffic: Sequence[TrafficFolder]) -> str:
    """Returns the fingerprint of the traffic's tokenizer and template. Raises UserError for several."""
    templates = {folder.policy.fingerprint: folder.path for folder in traffic}
    if len(templates) > 1:
        listed = ", ".join(f"{fingerprint} in {path}" for fingerprint, path in templates.items())
        raise UserError(
            f"the traffic is of models with different tokenizers or templates ({listed}); give the folders of one."
        )
    return next(iter(templates), "")


def _require_template(template: str, chain: str) -> None:
    """Raises UserError for traffic of a model with another tokenizer or template than that of a chain's versions.

    A chain without a tokenizer beside its versions is not compared.
    """
    checkpoint = open_checkpoint(f"{PATCHES_PREFIX}{chain}")
    if not template or checkpoint.tokenizer_files() is None:
        return
    if (ours := text_fingerprint(checkpoint.text)) != template:
        raise UserError(
            f"{chain} has another tokenizer or template ({ours}) than the traffic ({template}): this is the traffic of "
            "another chain; give the --traffic of its servers."
        )


def describe_progress(release: Release, progress: BatchProgress, rules: BatchRules) -> str:
    """Returns in sentences how far the batch of a release is, and what to look at before it is trained."""
    if progress.manifest is None:
        return (
            f"{progress.sessions} of {rules.min_sessions} sessions are labelled and can be trained; {progress.missing} "
            "more are needed."
        )
    monitors, left_out = progress.manifest["monitors"], progress.manifest["drops"]["sessions"]
    sentences = [
        f"release {release.number} learns from {progress.sessions} sessions.",
        f"Their tokens are those of {monitors['effective_users']:.3g} effective users.",
    ]
    if left_out:
        listed = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        sentences.append(f"Sessions that were left out, by reason: {listed}.")
    if changes := monitors["direction"]["changes_sign"]:
        sentences.append(
            f"Without {', '.join(changes)} it would move kept edits the other way; look at monitors.direction of "
            "batch.json before it is trained."
        )
    return " ".join(sentences)
