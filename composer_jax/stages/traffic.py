"""Production traffic of a workdir: its folders are labelled, read for a canary, shown, and forgotten from."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.errors import UserError
from composer_jax.observe.report import write_report
from composer_jax.realtime.batches.store import forget_sessions
from composer_jax.realtime.labels.judge import FollowUpJudge, RuleJudge
from composer_jax.realtime.labels.label_sessions import LabelRun, label_sessions
from composer_jax.realtime.labels.model_judge import ModelJudge
from composer_jax.realtime.labels.signal_types import ChatText, LabelContext
from composer_jax.realtime.labels.store import Label, LabelStore
from composer_jax.realtime.labels.summary import format_run, rank_correlations, summarize_labels, summary_tables
from composer_jax.realtime.release.canary import LabelRow
from composer_jax.realtime.release.label_rows import canary_rows
from composer_jax.realtime.release.releases import Release, read_releases
from composer_jax.realtime.release.tables import release_tables
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.policy import text_fingerprint
from composer_jax.serve.traffic.records import SessionRecord
from composer_jax.serve.traffic.retention import forget

DEFAULT = "traffic"
"""The folder in a workdir that one server writes."""
DAY_S = 86_400.0
SHORT_S, LONG_S = 600.0, DAY_S
"""Ages whose labels `keep_correlations` compares."""


def traffic_folders(workdir: str | Path, names: Sequence[str]) -> list[TrafficFolder]:
    """Returns the folders called `names`, or else WORKDIR/traffic.

    Raises:
      UserError: one is not a traffic folder, or two hash the same user differently.
    """
    folders = [TrafficFolder(Path(name).expanduser()) for name in names or [Path(workdir).expanduser() / DEFAULT]]
    if len({folder.policy.salt for folder in folders}) > 1:
        raise UserError(
            f"{folders[0].path} and the others have different salts, so a user has two hashes; give all servers a "
            '--traffic_policy with the same "salt" before they write.'
        )
    return folders


def label_traffic(
    folders: Sequence[TrafficFolder],
    horizon: float,
    checkpoint: str,
    judge: FollowUpJudge,
    own_signals: Mapping[str, str] | None = None,
    *,
    clock: Callable[[], float] = time.time,
) -> list[LabelRun]:
    """Labels the sessions of all folders that are old enough; returns what was done in each.

    Args:
      horizon: age in seconds.
      checkpoint: address of weights whose chat format wrote the sessions; "" censors signals that need a text.
      own_signals: see `label_sessions`.

    Raises:
      UserError: the checkpoint has another format than the traffic, or as `label_sessions` does.
    """
    text = open_checkpoint(checkpoint).text if checkpoint else None
    runs = []
    for folder in folders:
        if text is not None and (theirs := folder.policy.fingerprint) != (ours := text_fingerprint(text)):
            raise UserError(
                f"{checkpoint} has another tokenizer or template ({ours}) than the traffic in {folder.path} "
                f"({theirs}); give the weights that served it, or leave --checkpoint out."
            )
        context = LabelContext(ChatText(text.chat_format) if text is not None else None, judge)
        days = folder.policy.retention_days
        with contextlib.closing(open_database(folder.path)) as database:
            runs.append(
                label_sessions(
                    folder,
                    database,
                    horizon,
                    context=context,
                    own_signals=own_signals,
                    retention_days=days,
                    clock=clock,
                )
            )
    return runs


def describe_labels(folder: TrafficFolder, horizon: float, run: LabelRun) -> str:
    """Returns what labelling a folder did, and a summary of all its labels of this age, in lines."""
    with contextlib.closing(open_database(folder.path)) as database:
        labels = LabelStore(database).read(horizon)
    return f"{folder.path}\n{format_run(run, summarize_labels(labels))}"


def judge_at(url: str, model: str, key: str = "") -> FollowUpJudge:
    """Returns the judge of follow-ups at an address of OpenAI's API, or without one the rules."""
    if bool(url) != bool(model):
        raise UserError(f"--judge={url!r} and --judge_model={model!r}: give both, or none for the rules.")
    return ModelJudge(url, model, key=key) if url else RuleJudge()


def read_labels(folders: Sequence[TrafficFolder], horizon: float) -> tuple[list[Label], dict[str, SessionRecord]]:
    """Returns the labels of a horizon in all folders whose sessions exist, and those sessions' records."""
    labels: list[Label] = []
    records: dict[str, SessionRecord] = {}
    for folder in folders:
        here = {record.session: record for record in folder.sessions()}
        with contextlib.closing(open_database(folder.path)) as database:
            labels += [label for label in LabelStore(database).read(horizon) if label.session in here]
        if twice := here.keys() & records.keys():
            raise UserError(
                f"session {min(twice)!r} is in two folders of traffic; let the router choose the server of a user."
            )
        records |= here
    return labels, records


def rows_of_canary(folders: Sequence[TrafficFolder], horizon: float, release: Release) -> list[LabelRow]:
    """Returns what the labels of a horizon say about a release's canary; see `canary_rows`."""
    labels, records = read_labels(folders, horizon)
    return canary_rows(release, labels, records)


def forget_traffic(
    workdir: str | Path, folders: Sequence[TrafficFolder], *, session: str = "", user: str = ""
) -> list[str]:
    """Deletes a session or a user from all folders, and from the batches of a workdir; returns the sessions' ids.

    See retention.forget.
    """
    names = [name for folder in folders for name in forget(folder.path, session=session, user=user)]
    forget_in_batches(workdir, folders)
    return names


def forget_in_batches(workdir: str | Path, folders: Sequence[TrafficFolder], now: float = -math.inf) -> list[str]:
    """Deletes from the batches of a workdir what the folders no longer may have; returns the ids of the sessions.

    These are sessions with a tombstone, those of a forgotten user, and those that are older than the folders keep
    theirs at `now`, Unix seconds.
    """
    sessions: set[str] = set()
    users: dict[str, float] = {}
    for folder in folders:
        with contextlib.closing(open_database(folder.path)) as database:
            for kind, name, when in database.execute("SELECT kind, name, time FROM tombstones"):
                if kind == "user":
                    users[name] = max(when, users.get(name, when))
                else:
                    sessions.add(name)
    days = max((folder.policy.retention_days for folder in folders), default=math.inf)
    oldest = now - (days + 1) * DAY_S  # a session is kept until the day on which it opened is over so many days ago

    def is_gone(row: Mapping[str, Any]) -> bool:
        was_forgotten = row["opened"] <= users.get(row["user"], -math.inf)
        return row["session"] in sessions or was_forgotten or row["opened"] < oldest

    return forget_sessions(workdir, is_gone)


def write_traffic_page(workdir: str | Path, folders: Sequence[TrafficFolder], horizon: float) -> Path:
    """Writes WORKDIR/report.html with releases, signals by version, and what was dropped; returns its path."""
    labels, _ = read_labels(folders, horizon)
    tables = [*release_tables(read_releases(workdir)), *summary_tables(summarize_labels(labels))]
    return write_report(Path(workdir).expanduser(), traffic=tables)


def keep_correlations(folders: Sequence[TrafficFolder]) -> dict[str, float]:
    """Returns version -> rank correlation of kept lines after 10 minutes with those after a day.

    One that falls below that of the versions before says that the early label no longer stands for the late one.
    """
    short, long = (read_labels(folders, horizon)[0] for horizon in (SHORT_S, LONG_S))
    return {version: row.correlation for version, row in rank_correlations(short, long).items()}


def traffic_counts(folders: Sequence[TrafficFolder]) -> list[dict[str, Any]]:
    """Returns {"folder", "sessions", "users", "tombstones": {reason: number}} of every folder."""
    rows = []
    for folder in folders:
        sessions = folder.sessions()
        with contextlib.closing(open_database(folder.path)) as database:
            query = "SELECT reason, count(*) FROM tombstones WHERE kind = 'session' GROUP BY reason"
            tombstones = dict(database.execute(query).fetchall())
        users = len({record.user for record in sessions})
        rows.append({"folder": str(folder.path), "sessions": len(sessions), "users": users, "tombstones": tombstones})
    return rows
