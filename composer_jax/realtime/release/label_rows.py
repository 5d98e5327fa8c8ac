"""Labels of production sessions as the rows that a canary's test reads."""

from collections.abc import Iterable, Mapping

from composer_jax.errors import UserError
from composer_jax.realtime.labels.store import Label
from composer_jax.realtime.release.canary import LabelRow
from composer_jax.realtime.release.releases import Release
from composer_jax.serve.traffic.records import SessionRecord

CANARY_SIGNALS = ("keep", "follow_up", "edited")
"""What a canary must not harm: what users keep of the edits, whether their next messages are content, and how often it
edits at all. Without the last one, a policy that asks in place of editing would harm nothing."""


def canary_rows(release: Release, labels: Iterable[Label], records: Mapping[str, SessionRecord]) -> list[LabelRow]:
    """Returns a row per observed signal of the sessions that opened in a release's canary, by their opening.

    The values are those of the signals, not of rewards: those change as other sessions are labelled.

    Args:
      labels: of one horizon and labeller.
      records: session -> its record, whose arm the server wrote.

    Raises:
      UserError: a session of the canary has no arm.
    """
    steps = [(row["time"], row["fraction"]) for row in release.transitions if row["state"] == "canary"]
    rows = []
    for label in sorted(labels, key=lambda label: records[label.session].opened):
        record = records[label.session]
        fraction = next((fraction for time, fraction in reversed(steps) if time <= record.opened), None)
        if fraction is None:
            continue
        if record.arm not in ("anchor", "candidate"):
            raise UserError(
                f"session {label.session!r} opened in the canary on a server without an arm; start every server of the "
                "canary with --arm=anchor or --arm=candidate, and roll back or begin anew."
            )
        values = [(name, label.signals[name].value) for name in CANARY_SIGNALS if name in label.signals]
        rows += [
            LabelRow(record.user, record.arm, fraction, value, name) for name, value in values if value is not None
        ]
    return rows
