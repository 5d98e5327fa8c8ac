"""The update of a release: one epoch over a batch of traffic and over groups that are played now, and its candidate.

A process that is killed anywhere leaves nothing half done. The same call plays the groups that are not stored, takes
all minibatches again from the anchor's checkpoint, and gets the same weights bit for bit. It writes one checkpoint, of
the weights after the last minibatch, and then publishes them as one version with the label {"release": NUMBER}.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from composer_jax.checkpoint.checkpoint import describe_versions
from composer_jax.checkpoint.native import restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.checkpoint.weight_chain import ChainFiles, WeightPublisher
from composer_jax.checkpoint.weight_shards import published_shards
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.compilations import count_compilations
from composer_jax.observe.journal import read_journal
from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import require_one_process
from composer_jax.realtime.batches.store import TrafficBatch, require_batch_of
from composer_jax.realtime.config import TrafficConfig
from composer_jax.realtime.release.releases import Release
from composer_jax.rl.config import RLConfig
from composer_jax.rl.learning_step import Cursor, complete_step, learner_arguments
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.orchestrator import Learning
from composer_jax.schema.config_dict import to_config_dict
from composer_jax.seeds import seeded_random
from composer_jax.stages.memory_check import memory_check
from composer_jax.stages.replay_train import NOT_PLAYED
from composer_jax.stages.run import Run
from composer_jax.stages.simulated_groups import play_simulated, reserve_groups
from composer_jax.stages.train_rl import open_update
from composer_jax.train.learner import TrainState
from composer_jax.train.loop import save_state
from composer_jax.train.optimizer import learning_rate_schedule

ALGORITHM = "given"
"""Of rl.algorithm.ALGORITHMS: advantages of sessions are the batch's, those of simulated groups follow from rewards."""


class NothingLearned(UserError):
    """No minibatch of an update changed the weights: there is no candidate."""


@dataclasses.dataclass(frozen=True)
class Minibatch:
    """What one optimizer step of an update learns from."""

    sessions: Sequence[int]
    """Places of groups in the batch."""
    simulated: Sequence[int]
    """Numbers of groups in the run's ledger."""


def train_release(run: Run, release: Release, batch: TrafficBatch, algorithm: str = ALGORITHM) -> int:
    """Trains the candidate of a release on its batch and publishes it; returns its version, the anchor's plus one.

    Leaves a checkpoint in checkpoints/rl, one row for each minibatch in metrics/rl.jsonl, and the version in
    rl.publish.

    algorithm: as rl.algorithm.name; another one may weigh sessions by anything but their given advantages.

    Raises:
      NothingLearned: no minibatch had anything to train, or all gradients were not finite. There is no checkpoint
        and no version then; rows of metrics stay until the next update, which also learns from the groups that were
        played.
      UserError: the batch is that of another release, chain or version; the learner holds other weights than the
        release's anchor; somebody has published since; or RL was interrupted.
    """
    require_one_process("an update from traffic")
    _require_fitting(run, release, batch)
    version, files = release.anchor + 1, ChainFiles(release.chain)
    labels = {"release": release.number}
    if (newest := max(manifests := files.manifests())) > release.anchor:
        if newest == version and manifests[version].get("release") == release.number:
            return version
        raise UserError(
            f"{release.chain} has version {newest}, which somebody has published since release {release.number} began "
            f"at version {release.anchor}; {_way_back(release)}."
        )
    with (
        memory_check(run, "rl"),
        run.model.store("rl") as store,
        RolloutLedger(run.path, run.workdir.require_held) as ledger,
    ):
        if _has_learned(store, release):
            weights = restore_weights(store, run.model.definition, run.stage_mesh("rl"))
            WeightPublisher(release.chain).publish(published_shards(*weights), version, labels)
        else:
            publisher = WeightPublisher(release.chain)
            state = _learn(run, release, batch, update_config(run, algorithm), store, ledger, publisher)
            publisher.publish(published_shards(state.params, state.router_bias), version, labels)
        if not run.config.rl.keep_groups:
            ledger.forget(ledger.admitted)
    return version


def open_chain(run: Run) -> int:
    """Returns the version that the learner goes on from, and makes sure that rl.publish and checkpoints/rl have it.

    A run whose RL has not begun gets version 0, the weights that RL would start from.

    Raises:
      UserError: rl.publish is empty, or RL was interrupted.
    """
    require_one_process("an update from traffic")
    chain = _require_chain(run)
    with run.model.store("rl") as store:
        if store.latest_step() is None:
            state = run.model.learner("rl").init_state(*run.model.weights_before("rl"))
            save_state(store, state, 0, cursor=Cursor().to_json())
        version = Cursor(**store.read_json()["cursor"]).weight_version
        if version not in ChainFiles(chain).versions():
            run.model.chat  # noqa: B018 - writes the tokenizer's files, which the versions need beside them
            describe_versions(chain, ModelDef(run.config.stage_model("rl")), str(run.path))
            weights = restore_weights(store, run.model.definition, run.stage_mesh("rl"))
            WeightPublisher(chain).publish(published_shards(*weights), version)
    return version


def require_learning_rate(run: Run) -> None:
    """Raises a UserError if the next update would have a learning rate of 0; the learner has a checkpoint."""
    with run.model.store("rl") as store:
        _require_rate(run, Cursor(**store.read_json()["cursor"]))


def traffic_hash(run: Run) -> str:
    """Returns 12 hex digits of the SHA-256 of the section of traffic that this process has."""
    section = to_config_dict(run.config).to_dict()["traffic"]
    return hashlib.sha256(json.dumps(section, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


def learner_of(run: Run) -> str:
    """Returns the folder of the learner's checkpoints, which releases name."""
    return str(run.path / "checkpoints" / "rl")


def update_config(run: Run, algorithm: str = ALGORITHM) -> RLConfig:
    """Returns the section of RL as updates from traffic use it. algorithm: its name or import path."""
    rl, rate = run.config.rl, run.config.traffic.learning_rate
    if rate is not None:
        constant = dataclasses.replace(rl.optimizer, peak=rate, warmup=0, decay="constant")
        rl = dataclasses.replace(rl, optimizer=constant)
    return dataclasses.replace(rl, algorithm=dataclasses.replace(rl.algorithm, name=algorithm, options={}))


def split_batch(sessions: int, config: TrafficConfig, group_size: int, seed: int) -> list[tuple[list[int], int]]:
    """Returns minibatches of a batch in a random order: (places of its sessions, number of simulated groups).

    Simulated groups have simulated_fraction of all episodes, to the nearest group, and lie in all minibatches evenly.

    sessions: of the batch, one episode each.
    """
    order = list(range(sessions))
    seeded_random("traffic minibatches", seed).shuffle(order)
    count, fraction = math.ceil(sessions / config.minibatch_sessions), config.simulated_fraction
    simulated = max(round(sessions * fraction / (1 - fraction) / group_size), int(fraction > 0))
    cut = lambda total, i: i * total // count  # noqa: E731
    return [
        (order[cut(sessions, i) : cut(sessions, i + 1)], cut(simulated, i + 1) - cut(simulated, i))
        for i in range(count)
    ]


def _learn(
    run: Run,
    release: Release,
    batch: TrafficBatch,
    config: RLConfig,
    store: CheckpointStore,
    ledger: RolloutLedger,
    publisher: WeightPublisher,
) -> TrainState:
    """Plays and learns; returns the state after the last minibatch, whose checkpoint is complete."""
    update, state, cursor = open_update(run, store, config)
    _require_rate(run, cursor)
    if cursor.weight_version != release.anchor:
        raise UserError(
            f"the learner in {store.directory} has version {cursor.weight_version}, and release {release.number} goes "
            f"on from version {release.anchor}; {_way_back(release)}."
        )
    # The anchor is pinned, so this compares the learner's weights with those that users have, and writes nothing.
    publisher.publish(published_shards(state.params, state.router_bias), release.anchor)
    parts = split_batch(len(batch.groups), run.config.traffic, config.group_size, release.number)
    run.services.prepare_updates()
    source, numbers = reserve_groups(run, ledger, cursor.task_step, sum(count for _, count in parts))
    remaining = iter(numbers)
    minibatches = [Minibatch(sessions, [next(remaining) for _ in range(count)]) for sessions, count in parts]
    sampler = run.services.sampler_with(state.params, state.router_bias, version=release.anchor)
    play_simulated(run, ledger, source, [minibatch.simulated for minibatch in minibatches], sampler)
    sampler.release()
    learning = Learning(update, state, cursor, run.model.utilisation("rl"))
    state, taken = _take_minibatches(run, config, release, learning, minibatches, batch, ledger)
    after = Cursor(cursor.task_step + taken, release.anchor + 1, int(state.step))
    save_state(store, state, after.task_step, cursor=after.to_json(), release=release.number)
    store.wait()
    return state


def _take_minibatches(
    run: Run,
    config: RLConfig,
    release: Release,
    learning: Learning,
    minibatches: Sequence[Minibatch],
    batch: TrafficBatch,
    ledger: RolloutLedger,
) -> tuple[TrainState, int]:
    """Takes a step for each minibatch until the policy is too far from the one that sampled; returns their number.

    sampler_kl is that of the weights before a step, so the step that exceeds the limit is the last one.
    """
    state, cursor = learning.state, learning.cursor
    first: float | None = None
    taken, is_updated = 0, False
    name = f"release {release.number}"
    with run.metrics("rl") as metrics, Progress(len(minibatches), "minibatch", name) as progress:
        metrics.truncate_after(cursor.task_step)
        for minibatch in minibatches:
            began, compilations = time.perf_counter(), count_compilations()
            simulated = [ledger.load(number) for number in minibatch.simulated]
            groups = [*(batch.groups[i] for i in minibatch.sessions), *simulated]
            before = Cursor(cursor.task_step + taken, release.anchor, int(state.step))
            learns = time.perf_counter()
            state, result = learning.learner.step(state, *learner_arguments(config, before, groups))
            train_s = time.perf_counter() - learns
            completed = complete_step(config, before, groups, state, result, train_s, learning.utilisation)
            taken, is_updated = taken + 1, is_updated or completed.is_updated
            kl = completed.row.get("sampler_kl")
            first = kl if first is None else first
            row = completed.row | {
                "release": release.number,
                "simulated_episodes": sum(len(group.episodes) for group in simulated),
                "train_s": train_s,
                "step_s": time.perf_counter() - began,
                "compilations": count_compilations() - compilations,
            }
            metrics.write(completed.step, **row, **NOT_PLAYED)
            progress.update(1, kl=kl)
            if kl is not None and first is not None and kl - first > run.config.traffic.kl_limit:
                break
    if not is_updated:
        raise NothingLearned(
            f"release {release.number} has learned nothing: none of its {taken} minibatches had a finite gradient or "
            "an advantage; look at the batch and at metrics/rl.jsonl."
        )
    return state, taken


def _require_rate(run: Run, cursor: Cursor) -> None:
    """Raises a UserError if the learning rate after a position is 0."""
    config = update_config(run)
    if not learning_rate_schedule(config.optimizer, config.steps)(cursor.optimizer_step):
        raise UserError(
            f"rl.optimizer has a learning rate of 0 after RL (final={config.optimizer.final}), so no update would "
            "change a weight; give --config.traffic.learning_rate=RATE."
        )


def _has_learned(store: CheckpointStore, release: Release) -> bool:
    """Returns whether the latest checkpoint is that of the release's candidate."""
    if store.latest_step() is None:
        return False
    saved = store.read_json()
    return saved.get("release") == release.number and saved["cursor"]["weight_version"] == release.anchor + 1


def _way_back(release: Release) -> str:
    """Returns what a person does where chain or learner have gone on without the release, as a part of a sentence."""
    return (
        f"end the release with `launch.traffic gate --refuse=REASON`, and make version {release.anchor} the newest one "
        f"again with `rollback --to={release.anchor} --reason=REASON`"
    )


def _require_fitting(run: Run, release: Release, batch: TrafficBatch) -> None:
    """Raises a UserError if run, release and batch are not of one chain and version."""
    chain = _require_chain(run)
    if chain != release.chain:
        raise UserError(f"release {release.number} is of versions in {release.chain}, and rl.publish is {chain}.")
    require_batch_of(batch, release.chain, release.anchor)
    if (number := batch.manifest["release"]) != release.number:
        raise UserError(f"the batch is that of release {number}, not {release.number}; give the one of this release.")
    if not batch.groups:
        raise NothingLearned(f"the batch of release {release.number} has no session; look at its dropped ones.")


def _require_chain(run: Run) -> str:
    """Returns the chain of the run's versions, as releases name it."""
    run.model.require_stage("rl")
    if not (chain := run.config.rl.publish):
        raise UserError("rl.publish is empty, so no version can be released; name a folder in the config.")
    if not run.is_done("rl") and read_journal(run.path / "batches.jsonl"):
        raise UserError(f"RL in {run.path} was interrupted; complete it (launch.rl) before traffic is learned from.")
    return chain if "://" in chain else str(Path(chain).expanduser().absolute())
