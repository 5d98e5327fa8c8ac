"""What `launch.traffic simulate` does: a base is trained, and learns from simulated users, release after release.

The cycle is that of production (traffic_cycle.py) with another clock and with users in this process. A killed process
goes on where it was.
"""

import sys
from collections.abc import Callable
from typing import Any

from composer_jax.errors import UserError
from composer_jax.extensions import import_object
from composer_jax.observe.metrics import read_metrics
from composer_jax.realtime.labels.window import GRACE_S, WRITE_MARGIN_S
from composer_jax.realtime.release.releases import ENDED, Release, ReleaseFolder, read_releases
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.stages.pretrain import pretrain
from composer_jax.stages.released_learner import LearnerCheckpoints
from composer_jax.stages.run import Run
from composer_jax.stages.sft import sft
from composer_jax.stages.simulated_traffic import Arms, SimulatedTraffic
from composer_jax.stages.traffic_cycle import CycleStep, Deployment, advance
from composer_jax.stages.traffic_update import open_chain
from composer_jax.stages.traffic_users import TrafficUsers

METRICS = "users"
"""metrics/users.jsonl has a row for each cycle."""
CANARY_PART = 8
"""A step of a canary has one session for so many of a batch."""
MARGIN_S = 60.0
"""Simulated seconds that pass after the last label is due."""
Advance = Callable[[Run, ReleaseFolder, Deployment], CycleStep]
"""Does the next transition of the last release, as `advance` does."""


def simulate(run: Run, cycles: int, sessions: int, advance: Advance = advance) -> list[dict[str, Any]]:
    """Plays cycles of simulated users until there are so many releases; returns the rows of metrics/users.jsonl.

    Args:
      run: whose traffic.users are the users. Its stages before RL are run if they have not been.
      cycles: releases in all, those of earlier calls included.
      sessions: of each cycle, those of its canary not included.
      advance: does the transitions; another one may make other updates, to compare with.

    Raises:
      UserError: the config names no users or no folder of versions, a release waits for a person or for more sessions,
        or as the stages do.
    """
    if cycles < 1 or sessions < 1:
        raise UserError(f"cycles={cycles} and sessions={sessions}; use numbers from 1.")
    users = simulated_users(run)
    train_base(run)
    run.services.prepare_updates()
    open_chain(run)
    traffic = SimulatedTraffic(run, users, run.config.rl.publish)
    catch_up(run, traffic)
    learner = lambda checkpoints: LearnerCheckpoints(checkpoints, run.workdir.holder)  # noqa: E731
    with ReleaseFolder(run.path, by="simulation", clock=traffic.clock, learner=learner) as folder:
        while not _is_over(folder, cycles):
            if folder.releases and folder.last.state == "collecting":
                collect(run, traffic, folder.last, sessions)
            if folder.releases and folder.last.state == "canary":
                watch(run, traffic, folder.last, sessions)
            folders = [TrafficFolder(traffic.folder)] if folder.releases else []
            step = advance(run, folder, Deployment(folders, skip_aa=True, clock=traffic.clock))
            print(f"simulation: {step}", file=sys.stderr, flush=True)
            if not step.moved:
                raise UserError(f"{step}; decide it, or use more --sessions or a lower traffic.batch.min_sessions.")
    return read_metrics(run.path / "metrics" / f"{METRICS}.jsonl")


def train_base(run: Run) -> None:
    """Runs the stages before RL that have not been run."""
    if run.config.pretraining:
        pretrain(run)
    if "sft" in run.config.stages:
        sft(run)


def catch_up(run: Run, traffic: SimulatedTraffic) -> None:
    """Lets the simulated time pass until the last transition: a person who decides has another clock."""
    times = [row["time"] for release in read_releases(run.path) for row in release.transitions]
    if times and max(times) > traffic.clock():
        traffic.pass_until(max(times))


def collect(run: Run, traffic: SimulatedTraffic, release: Release, sessions: int) -> None:
    """Plays the sessions of a release that collects, lets time pass until they can be labelled, and writes the truth.

    The cycle of a release is its number.
    """
    cycle = release.number
    traffic.play(cycle, range(sessions), Arms(release.anchor))
    rows = traffic.rows(cycle).values()  # of earlier calls, too: the batch takes all of them
    traffic.pass_until(_due(run, traffic, cycle, run.config.traffic.batch.horizon_s))
    truth = traffic.users.summarize([row["truth"] for row in rows])
    with run.metrics(METRICS) as metrics:
        metrics.truncate_after(cycle - 1)  # the row of a call with fewer sessions
        metrics.write(cycle, version=release.anchor, **truth)
    shown = {name: value for name, value in truth.items() if name in traffic.users.shown and value is not None}
    words = ", ".join(f"{name} {value:.2f}" for name, value in shown.items())
    print(f"simulation: cycle {cycle} with version {release.anchor}: {words}", file=sys.stderr, flush=True)


def watch(run: Run, traffic: SimulatedTraffic, release: Release, sessions: int) -> None:
    """Plays the sessions of a canary's step, which are only measured, and lets time pass until they are labelled."""
    steps = sum(row["state"] == "canary" for row in release.transitions)
    count = max(1, sessions // CANARY_PART)
    first = sessions + (steps - 1) * count
    arms = Arms(release.anchor, release.version, release.salt, release.fraction)
    traffic.play(release.number, range(first, first + count), arms, measured_only=True)
    traffic.pass_until(_due(run, traffic, release.number, run.config.traffic.canary.horizon_s))


def _due(run: Run, traffic: SimulatedTraffic, cycle: int, horizon: float) -> float:
    """Returns when all sessions of a cycle so far can be labelled."""
    return traffic.closed(cycle) + horizon + GRACE_S + WRITE_MARGIN_S + MARGIN_S


def simulated_users(run: Run, **options: Any) -> TrafficUsers:
    """Returns traffic.users, with these options beside traffic.users_options. Raises UserError if there are none."""
    config = run.config.traffic
    if not config.users:
        raise UserError("config.traffic.users is empty, so nobody works with the model; use --config=tiny:traffic.")
    kind, options = import_object(config.users, "config.traffic.users"), {**config.users_options, **options}
    try:
        return kind(run.config.seed, **options)
    except TypeError as error:
        raise UserError(f"config.traffic.users_options={options} do not fit {config.users!r}: {error}.") from error


def _is_over(folder: ReleaseFolder, cycles: int) -> bool:
    """Returns whether the last release has ended and, if the gate refused its candidate, was rolled back."""
    if not folder.releases or folder.last.state not in ENDED:
        return False
    is_undone = folder.last.state != "failed" or folder.last.version is None
    return folder.last.number >= cycles and is_undone
