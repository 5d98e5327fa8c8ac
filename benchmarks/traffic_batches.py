"""What one organisation can do to a batch, and what a batch costs, on scripted users.

    python -m benchmarks.traffic_batches

An organisation with 30 % of the users poisons: its users report the reverse of what the hidden tests say, and revert
what is good. The batch is built as in production, from labels, once with the caps and once without.
"""

import dataclasses
import json
import sqlite3
import tempfile
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from composer_jax.observe.progress import hide_progress
from composer_jax.realtime.batches.advantages import BatchNumbers, weigh_sessions
from composer_jax.realtime.batches.build import BatchInputs, build_batch
from composer_jax.realtime.batches.monitors import measure_batch
from composer_jax.realtime.batches.rules import BatchRules
from composer_jax.realtime.batches.selection import LabelledSession, Selection, SelectionRules, select_sessions
from composer_jax.realtime.batches.versions import TrainableVersions
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.labels.signal_types import LabelContext
from composer_jax.realtime.release.releases import Release
from composer_jax.realtime.simulation import SimulatedCycle, SimulatedPolicy, SimulatedText, SimulatedWorld
from composer_jax.serve.traffic.records import SessionRecord

HORIZON_S = 3600.0
PART = 0.3
"""Of the users, who belong to the organisation that poisons."""
ORGANISATION = "poison"
WORLD = SimulatedWorld(users=1000, sessions=4000)
UNCAPPED = BatchRules(cap_user=1.0, cap_repository=1.0, cap_organisation=1.0)


class PoisonedCycle(SimulatedCycle):
    """A cycle in which the users of one organisation report the reverse of the truth."""

    def __init__(self, world: SimulatedWorld, policy: SimulatedPolicy, seed: int, part: float = PART) -> None:
        super().__init__(world, policy, seed)
        rng = np.random.default_rng(seed + 1)
        self.is_poisoned = self.user < part * world.users
        self.content = np.where(self.is_poisoned, ~self.passes, self.content)
        delays = rng.exponential(world.revert_s, world.sessions)
        self.revert_after = np.where(self.content, np.inf, np.where(self.is_poisoned, delays / 20, delays))

    def _record(self, i: int) -> SessionRecord:
        return dataclasses.replace(super()._record(i), organisation=ORGANISATION if self.is_poisoned[i] else "")


def labelled_sessions(cycle: SimulatedCycle) -> list[LabelledSession]:
    """Returns the labelled sessions of a cycle, all of which have agreed to training."""
    hide_progress()
    context, database = LabelContext(SimulatedText()), sqlite3.connect(":memory:")
    run = label_sessions(cycle, database, HORIZON_S, context=context, clock=lambda: cycle.all_aged)
    hide_progress(False)
    records = {record.session: record for record in cycle.sessions()}
    return [LabelledSession(label, records[label.session], cycle, "training") for label in run.labels]


def learned_truth(cycle: SimulatedCycle, selection: Selection, numbers: BatchNumbers) -> float:
    """Returns the mean of advantage * (passes - mean of passes) over the sessions, the first answer of each.

    It is what the policy gradient of the batch does for answers that pass the hidden tests.
    """
    places = [int(one.candidate.record.session.rsplit("-", 1)[1]) for one in selection.sessions]
    passes = cycle.passes[places].astype(float)
    advantages = np.array([turns[0].advantage for turns in numbers.turns])
    return float((advantages * (passes - passes.mean())).mean())


def measure(world: SimulatedWorld = WORLD, seed: int = 0) -> dict[str, float]:
    """Returns the numbers of the page.

    poison_traffic          share of the organisation in the trained tokens
    poison_moves            its share in the sum of |weight * advantage| over tokens; poison_bound is what the caps
                            allow, limit * cap / mean |advantage| (realtime/batches/caps.py)
    poison_moves_uncapped   the same share without caps
    poison_truth, poison_truth_uncapped
                            what the batch does for answers that pass hidden tests, over that of a batch without the
                            organisation
    batch_bytes             most memory while a batch is built and written, for each session, beside the labels
    batch_per_s             sessions selected per second on one core
    """
    cycle = PoisonedCycle(world, SimulatedPolicy(version=1), seed)
    candidates = labelled_sessions(cycle)
    held_to = SelectionRules(HORIZON_S, TrainableVersions(frozenset((1,))))
    began = time.perf_counter()
    selection = select_sessions(candidates, held_to)
    seconds = time.perf_counter() - began
    rules = BatchRules()
    numbers, uncapped = (weigh_sessions(selection.sessions, one) for one in (rules, UNCAPPED))
    shown, free = (measure_batch(selection.sessions, one) for one in (numbers, uncapped))
    others = Selection([one for one in selection.sessions if one.candidate.record.organisation != ORGANISATION])
    alone = learned_truth(cycle, others, weigh_sessions(others.sessions, UNCAPPED))
    return {
        "poison_traffic": round(shown["organisations"][ORGANISATION]["traffic"], 3),
        "poison_moves": round(shown["organisations"][ORGANISATION]["advantages"], 3),
        "poison_bound": round(rules.advantage_limit * rules.cap_organisation / shown["mean_advantage"], 3),
        "poison_moves_uncapped": round(free["organisations"][ORGANISATION]["advantages"], 3),
        "poison_truth": round(learned_truth(cycle, selection, numbers) / alone, 3),
        "poison_truth_uncapped": round(learned_truth(cycle, selection, uncapped) / alone, 3),
        "batch_bytes": _bytes_of_batch(candidates[:1000], held_to),
        "batch_per_s": round(len(selection.sessions) / seconds),
    }


def _bytes_of_batch(candidates: list[LabelledSession], rules: SelectionRules) -> int:
    """Returns the most memory while a batch is built and written, for each session."""
    sessions = tuple(candidate.record.session for candidate in candidates)
    release = Release(1, "chain", 1, "salt", sessions=sessions, transitions=({"state": "labelled", "time": 0.0},))
    inputs = BatchInputs(release, [release], candidates, UNCAPPED, rules, labeller="", template="")
    with tempfile.TemporaryDirectory() as folder:
        hide_progress()
        tracemalloc.start()
        build_batch(folder, inputs)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        hide_progress(False)
    return round(peak / len(candidates))


def main(report: Callable[[str], None] = print) -> None:
    report(json.dumps(measure()))


if __name__ == "__main__":
    main()
