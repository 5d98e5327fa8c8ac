"""The arms of benchmarks.traffic_learning: runs of tiny:traffic that learn from simulated users, or do something else.

All arms of a seed start from one base, and the same users ask for the same in the same cycles, whatever the arm is.
"""

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.seeded_runs import run_pipeline
from composer_jax.atomic_write import write_atomically
from composer_jax.demo import notes
from composer_jax.demo.users import KEPT_S
from composer_jax.observe.journal import read_journal
from composer_jax.realtime.batches.store import TrafficBatch, read_batch
from composer_jax.realtime.labels.store import LabelStore
from composer_jax.realtime.release.releases import ReleaseFolder
from composer_jax.serve.traffic.database import open_database
from composer_jax.stages.run import Run
from composer_jax.stages.simulated_traffic import Arms, SimulatedTraffic
from composer_jax.stages.traffic_batch import learner_rows, make_batch
from composer_jax.stages.traffic_cycle import CycleStep, Deployment, advance
from composer_jax.stages.traffic_simulation import simulate, simulated_users
from composer_jax.stages.traffic_update import ALGORITHM, NothingLearned, open_chain, train_release
from configs import tiny

CYCLES = 6
SINGLE_CAPS = {"cap_user": 1.0, "cap_repository": 1.0, "cap_organisation": 1.0}


@dataclasses.dataclass(frozen=True)
class Arm:
    """What one arm does after each cycle of sessions."""

    learns: bool = True
    """Whether releases follow each other; else all cycles have the base."""
    cycles: int = CYCLES
    algorithm: str = ALGORITHM
    """Of its updates: rl.algorithm.name."""
    batch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What it changes in traffic.batch."""
    drops_failed_calls: bool = False
    """Whether sessions with a call that no tool could execute are left out of its batches."""
    is_advised: bool = False
    """Whether a sentence that earlier sessions show to be right stands before every first request."""


ARMS: Mapping[str, Arm] = {
    "loop": Arm(cycles=9),
    "none": Arm(learns=False, cycles=9),
    "rejection": Arm(algorithm="benchmarks.control_algorithms:AcceptedSessions"),
    "prompt": Arm(learns=False, is_advised=True),
    "failed_calls_dropped": Arm(cycles=4, drops_failed_calls=True),
    "edits_priced": Arm(cycles=4, batch={"weights": {"needless_question": 0.0, "own": {"edited": -1.0}}}),
    "poison_capped": Arm(cycles=4),
    "poison_uncapped": Arm(cycles=4, batch=SINGLE_CAPS),
}
"""Name -> arm. The controls of "loop" are "none", "rejection" and "prompt"."""


@dataclasses.dataclass(frozen=True)
class ArmRun:
    """A run of an arm in a folder of its own."""

    root: Path
    """Of the runs of all seeds, arms and populations."""
    size: str
    """Of configs/tiny.py: "traffic" or "traffic_smoke"."""
    seed: int
    name: str
    population: str
    sessions: int

    @property
    def arm(self) -> Arm:
        """What it does."""
        return ARMS[self.name]

    @property
    def base(self) -> Path:
        """The run whose SFT all arms of the seed start from."""
        return self.root / f"seed{self.seed}" / "base"

    @property
    def workdir(self) -> Path:
        """Its own folder."""
        return self.root / f"seed{self.seed}" / f"{self.name}_{self.population}"

    def play(self) -> None:
        """Plays all cycles; goes on where a killed process was. Trains the base of the seed if it is missing."""
        if not (self.base / "stages" / "sft.json").exists():
            run_pipeline(self.base, self.size, self.seed, stages="('pretrain','sft')", evaluate__which="('before',)")
        with Run(self.config(), self.workdir) as run:
            if self.arm.learns:
                self._take_traces()
                simulate(run, self.arm.cycles, self.sessions, self._advance)
            else:
                self._play_base(run)

    def config(self) -> Any:
        """Returns the run's config."""
        config: Any = tiny.get_config(self.size)
        config.seed, config.stages, config.base = self.seed, ("rl",), str(self.base / "checkpoints" / "sft")
        config.rl.publish = str(self.workdir.absolute() / "weights")
        config.traffic.batch.update(self.arm.batch)
        config.traffic.users_options.population = self.population
        return config

    def _take_traces(self) -> None:
        """Copies the conversations of SFT, which updates replay, from the base that has played the same ones."""
        folder = self.workdir / "data"
        folder.mkdir(exist_ok=True)
        for file in sorted((self.base / "data").glob("*traces.npz")):
            if not (folder / file.name).exists():
                write_atomically(folder / file.name, file.read_bytes())

    def _play_base(self, run: Run) -> None:
        anchor = open_chain(run)
        run.services.prepare_updates()
        for cycle in range(1, self.arm.cycles + 1):
            options = (
                {"advice": advice(truths_of(self.workdir, cycle - 1, self.sessions))} if self.arm.is_advised else {}
            )
            traffic = SimulatedTraffic(run, simulated_users(run, **options), run.config.rl.publish)
            traffic.play(cycle, range(self.sessions), Arms(anchor))

    def _advance(self, run: Run, folder: ReleaseFolder, deployment: Deployment) -> CycleStep:
        """As `advance`, with the arm's own update."""
        if not folder.releases or folder.last.state != "labelled":
            return advance(run, folder, deployment)
        rules = run.config.traffic.batch
        make_batch(folder, run.path, deployment.folders, rules, learner_rows(run.path))
        batch = read_batch(run.path, folder.last.number)
        if self.arm.drops_failed_calls:
            batch = without_failed_calls(batch, run.path / "traffic", rules.horizon_s)
        try:
            folder.record_candidate(train_release(run, folder.last, batch, self.arm.algorithm))
        except NothingLearned as error:
            folder.move("failed", str(error))
        return CycleStep(folder.last.number, folder.last.state, "")


def without_failed_calls(batch: TrafficBatch, traffic: Path, horizon: float) -> TrafficBatch:
    """Returns a batch without the sessions in which a call could not be executed. traffic: folder with the labels."""
    with contextlib.closing(open_database(traffic)) as database:
        labels = LabelStore(database).read(horizon)
    failed = {label.session for label in labels if label.signals["invalid_calls"].value}
    rows = batch.manifest["sessions"]
    kept = [i for i, row in enumerate(rows) if row["session"] not in failed]
    return TrafficBatch({**batch.manifest, "sessions": [rows[i] for i in kept]}, [batch.groups[i] for i in kept])


def truths_of(workdir: Path, cycle: int, sessions: int) -> list[dict[str, Any]]:
    """Returns the truths of the sessions of a cycle, those of its canary left out, by number; [] before the first."""
    file = workdir / "users" / f"{cycle:04d}.jsonl"
    rows = read_journal(file) if file.exists() else []
    return [row["truth"] for row in sorted(rows, key=lambda row: row["number"]) if row["number"] < sessions]


def advice(truths: Sequence[Mapping[str, Any]]) -> str:
    """Returns the sentence that sessions show to be right: whose notes users kept most of; "" without sessions.

    Only sessions whose users agree to training say anything.
    """
    kept = Counter[str]()
    for truth in truths:
        if truth["consent"] == "training" and truth["kept"].get(f"{KEPT_S:g}", 0.0) > 0.5:
            kept.update(truth["followed"])
    return notes.advice(max(sorted(kept), key=lambda person: kept[person])) if kept else ""


def read_json(file: Path) -> Any:
    """Returns the content of a JSON file; None if it is not there."""
    return json.loads(file.read_bytes()) if file.exists() else None
