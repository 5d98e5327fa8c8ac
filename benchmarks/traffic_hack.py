"""How many users have a policy that asks in place of editing when a release is stopped, on 20,000 scripted users.

    python -m benchmarks.traffic_hack ANCHOR CANDIDATE      # e.g. edit_rate=0.9,good=0.6 edit_rate=0.5,good=0.6

A release's two versions have rates that were measured with simulated users (benchmarks/traffic_learning.py). Scripted
users (realtime/simulation.py) work with policies of these rates, in the arms and steps of a real canary, and their
labels go into the canary's own test. So many of them see differences that 256 sessions do not show, so a rate changes
only where the measured difference is beyond chance.
"""

import dataclasses
import json
import math
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.traffic_learning_rows import CHANGED
from composer_jax.observe.progress import hide_progress
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.labels.signal_types import LabelContext
from composer_jax.realtime.release.canary import FRACTIONS, Arm, CanaryRules, LabelRow, arm_of, decide, look
from composer_jax.realtime.release.label_rows import CANARY_SIGNALS
from composer_jax.realtime.simulation import SimulatedCycle, SimulatedPolicy, SimulatedText, SimulatedWorld
from composer_jax.serve.traffic.records import SessionRecord

WORLD = SimulatedWorld(users=20_000, sessions=20_000)
"""Of one step of the canary, in which every user has one session."""
GATE = 0.0
"""The fraction of a candidate that no user gets."""
RELEASED = 1.0
Rates = Mapping[str, float | None]


class ArmCycle(SimulatedCycle):
    """The sessions of one arm's users, one of each."""

    def __init__(self, world: SimulatedWorld, policy: SimulatedPolicy, seed: int, arm: Arm, fraction: float) -> None:
        super().__init__(world, policy, seed)
        self._arm, self._fraction = arm, fraction
        self.user = np.arange(world.sessions)

    def sessions(self) -> list[SessionRecord]:
        """Returns the records of the sessions whose users have the arm."""
        salt = f"salt {self.seed}"
        return [one for one in super().sessions() if arm_of(salt, one.user, self._fraction) == self._arm]


def policy_of(rates: Rates) -> SimulatedPolicy:
    """Returns a scripted policy with measured rates: edit_rate, good (share of sessions whose hidden tests pass),
    malformed_call_rate. It asks where the measured one does not edit."""
    edits = rates["edit_rate"] or 0.0
    passes = min(1.0, (rates["good"] or 0.0) / edits) if edits else 0.0
    return SimulatedPolicy(1, passes, 1.0 - edits, rates.get("malformed_call_rate") or 0.0)


def rates_after(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Returns the rates of a cycle: that of the cycle before it where the two differ by less than two standard errors.

    before, after: of a row's "cycles". A call counts as a session here, so a small change of malformed calls is chance.
    """
    sessions = [sum(user[0] for user in cycle["users"].values()) for cycle in (before, after)]
    rates = {}
    for name in ("edit_rate", "good", "malformed_call_rate"):
        one, other = (cycle[name] or 0.0 for cycle in (before, after))
        pooled = (one * sessions[0] + other * sessions[1]) / sum(sessions)
        error = math.sqrt(pooled * (1 - pooled) * (1 / sessions[0] + 1 / sessions[1]))
        rates[name] = other if abs(other - one) > 2 * error else one
    return rates


def canary_fraction(anchor: Rates, candidate: Rates, seed: int, world: SimulatedWorld = WORLD) -> tuple[float, str]:
    """Returns the share of users that have a candidate when the canary rolls it back or holds it, and why.

    The share is RELEASED if the canary does neither.
    """
    policies: dict[Arm, SimulatedPolicy] = {"anchor": policy_of(anchor), "candidate": policy_of(candidate)}
    for step, fraction in enumerate(FRACTIONS):
        opened: list[tuple[float, LabelRow]] = []
        for arm, policy in policies.items():
            cycle = ArmCycle(world, policy, seed + step, arm, fraction)
            opened += _rows(cycle, arm, fraction)
        rows = [row for _, row in sorted(opened, key=lambda one: one[0])]
        decision, reason = decide(look(rows, CanaryRules()), CanaryRules(), CanaryRules().horizon_s)
        if decision in ("hold", "roll back"):
            return fraction, reason
    return RELEASED, ""


def _rows(cycle: ArmCycle, arm: Arm, fraction: float) -> list[tuple[float, LabelRow]]:
    """Returns (when its session opened, row) of every label that a canary reads."""
    hide_progress()
    context, database = LabelContext(SimulatedText()), sqlite3.connect(":memory:")
    labels = label_sessions(cycle, database, 3600.0, context=context, clock=lambda: cycle.all_aged).labels
    hide_progress(False)
    opened = {record.session: record.opened for record in cycle.sessions()}
    return [
        (opened[label.session], LabelRow(label.user, arm, fraction, value, name))
        for label in labels
        for name in CANARY_SIGNALS
        if (value := label.signals[name].value) is not None
    ]


def stopped_at(row: Mapping[str, Any]) -> tuple[float, str] | None:
    """Returns the smallest share of users at which a release of a run was stopped, and why; None if none was.

    A release is stopped at GATE by a gate with its monitors. One that this gate passes goes to 20,000 scripted users,
    with the rates that the cycles before and after it had, unless the users' taste changed between these: the rates are
    then of other users as well, which the arms of a canary never are. Of the loop, which shows what is stopped in vain,
    releases that its own gate refused do not count: they were worse, without a hack.

    row: of benchmarks.traffic_learning.
    """
    by_cycle = {cycle["cycle"]: cycle for cycle in row["cycles"]}
    for release in row["releases"]:
        if row["arm"] == "loop" and release["state"] != "released":
            continue
        verdict, before = release["monitored"], by_cycle[release["release"]]
        if verdict["verdict"] != "pass":
            return GATE, "; ".join(verdict["reasons"])
        cycle = release["release"] + 1
        after = by_cycle.get(cycle)
        if after is not None and cycle != CHANGED and release["state"] == "released":
            rates = rates_after(before, after)
            if all(rate == (before[name] or 0.0) for name, rate in rates.items()):
                continue  # how often a canary stops a policy that is the same: benchmarks.traffic, false_alarms
            fraction, reason = canary_fraction(before, rates, row["seed"])
            if fraction < RELEASED:
                return fraction, reason
    return None


def main(arguments: Sequence[str]) -> None:
    """Prints what the canary does with two policies."""
    anchor, candidate = ({k: float(v) for k, _, v in (p.partition("=") for p in a.split(","))} for a in arguments)
    fraction, reason = canary_fraction(anchor, candidate, 0)
    print(json.dumps({"stopped_at": fraction, "reason": reason, "world": dataclasses.asdict(WORLD)}))


if __name__ == "__main__":
    main(sys.argv[1:])
