"""Reinforcement learning against sandboxed repositories, with self-summarization in the loop."""

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from composer_jax.agent.episode_record import build_episode_record
from composer_jax.checkpoint.checkpoint import describe_versions
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.checkpoint.weight_chain import ANCHOR_EVERY, WeightPublisher
from composer_jax.checkpoint.weight_shards import BackgroundPublisher
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.episodes import EpisodeRecord, read_episodes, write_episodes
from composer_jax.observe.journal import read_journal
from composer_jax.observe.metrics import MetricsWriter, read_metrics
from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import (
    broadcast_from_process0,
    is_first_process,
    process_count,
    process_index,
    wait_at_barrier,
)
from composer_jax.rl.advantage_report import NodeAdvantages, token_advantages
from composer_jax.rl.config import RLConfig
from composer_jax.rl.engines.fleet import FleetPolicy
from composer_jax.rl.engines.learner_channel import LearnerFollower
from composer_jax.rl.group_source import GroupSource
from composer_jax.rl.learning_step import CompletedStep, Cursor
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.multi_host import LeadingUpdate, follow_update
from composer_jax.rl.orchestrator import Learning, Orchestrator, Playing, Watchers
from composer_jax.rl.played_group import PlayedGroup
from composer_jax.rl.policy_update import PolicyUpdate
from composer_jax.rl.replay import ReplayMix
from composer_jax.rl.weight_check import WeightCheck, check_row, gap_bound
from composer_jax.sampler.sampler import Sampler
from composer_jax.sampler.weight_checksums import WeightChecksums
from composer_jax.stages.fleet import PUBLISHED, check_engines, open_fleet, published_checksums, required_engine
from composer_jax.stages.memory_check import memory_check
from composer_jax.stages.periodic_evaluation import PeriodicEvaluation
from composer_jax.stages.rollout_workers import play_share
from composer_jax.stages.run import Run
from composer_jax.stages.sft import sft_conversations
from composer_jax.train.interrupt import ignore_signals
from composer_jax.train.learner import TrainState
from composer_jax.train.loop import SkippedSteps, restore_state, save_state

TOTALS = ("rollout_s", "sandbox_s", "train_s", "step_s", "sampled_tokens", "sandbox_runs", "sandbox_hits")
"""Columns of metrics/rl.jsonl whose sums are results of the stage."""


def train_rl(run: Run) -> None:
    """Leaves checkpoints/rl, metrics/rl.jsonl, metrics/evaluate_rl.jsonl, batches.jsonl and episodes/rl.jsonl.

    Several processes call it alike: all of them play episodes, sample and learn, as process 0 decides.
    """
    if run.is_done("rl"):
        return
    config = run.config.rl
    broadcast_from_process0(lambda: len(run.services.tasks.train))  # refuses tasks before weights are loaded
    memory = memory_check(run, "rl", samples=config.samples_here)
    with memory, run.stage("rl") as result, run.model.store("rl") as store:
        _refuse_traffic(run, store)
        if not config.samples_here:
            required = required_engine(run)  # in every process, because process 0 tells the others of its tokenizer
            broadcast_from_process0(lambda: check_engines(run, required))
        update, state, cursor = open_update(run, store)
        sampler, checksums = None, ()
        if config.samples_here:
            sampler = run.services.sampler_with(state.params, state.router_bias, version=cursor.weight_version)
            update.learner_checksums = sampler.learner_checksums
        else:
            update.learner_checksums = published_checksums(ModelDef(run.config.stage_model("rl")))
            checksums = update.learner_checksums(state.params)
        if not is_first_process():
            _follow(run, update, state, cursor, sampler, store)
            return
        _take_steps(run, update, state, cursor, sampler or checksums, store)
        rows = read_metrics(run.path / "metrics" / "rl.jsonl")
        gaps = [row["weight_gap"] for row in rows if row.get("weight_gap") is not None]
        result |= {
            "steps": config.steps,
            "episodes": config.steps * _episodes_per_step(run),
            **{name: sum(row[name] for row in rows) for name in TOTALS},
            "weight_gap_max": max(gaps, default=None),
            "compilations_after_first_tenth": sum(r["compilations"] for r in rows[max(1, len(rows) // 10) :]),
        }


def _refuse_traffic(run: Run, store: CheckpointStore) -> None:
    """Raises a UserError if the learner goes on from a release, whose steps RL has no groups of.

    Several processes call it alike.
    """
    saved = store.read_json() if store.latest_step() is not None else {}
    has_begun = broadcast_from_process0(lambda: bool(read_journal(run.path / "batches.jsonl")))
    if "release" in saved or ("restores" in saved and not has_begun):  # RL itself goes on from what was restored
        raise UserError(
            f"{run.path} has learned from traffic, after which there is no RL; go on with launch.traffic cycle or "
            "simulate, or choose another --workdir."
        )


def open_update(
    run: Run, store: CheckpointStore, config: RLConfig | None = None
) -> tuple[PolicyUpdate, TrainState, Cursor]:
    """Returns the learning half of RL, with the state and the position of the latest checkpoint or of the beginning.

    config: None is that of the run; another one has an optimizer of the same kind.
    """
    config, mix = config or run.config.rl, _replay_mix(run)  # before weights are loaded: experts may have to play
    params, router_bias = run.model.weights_before("rl")
    learner = run.model.learner("rl", config)
    state, cursor = learner.init_state(params, router_bias), Cursor()
    if restored := restore_state(store, state):
        state, saved = restored
        cursor = Cursor(**saved["cursor"])
    update = PolicyUpdate(config, learner, run.model.chat)
    update.set_reference(params, router_bias)
    if mix is not None:
        update.set_replay(mix)
    return update, state, cursor


def _replay_mix(run: Run) -> ReplayMix | None:
    """Returns the conversations of rl.replay; None where it is off."""
    config = run.config.rl
    if not config.replay.fraction:
        return None
    if (before := run.model.stage_before("rl")) is not None:
        broadcast_from_process0(lambda: run.workdir.stage_result(before))  # raises before experts play for minutes
    mix = ReplayMix(config.replay, sft_conversations(run), config.batches[-1][0], run.config.seed)
    if mix.left_out:
        logging.warning(
            "rl.replay leaves out %d conversations of SFT: they train no token, or are longer than a row of rl.batches,"
            " %d tokens.",
            mix.left_out,
            config.batches[-1][0],
        )
    return mix


def _take_steps(
    run: Run,
    update: PolicyUpdate,
    state: TrainState,
    cursor: Cursor,
    sampler: Sampler | WeightChecksums,
    store: CheckpointStore,
) -> None:
    """Takes all steps that the latest checkpoint does not have; an interrupt saves before it leaves.

    sampler: where engines sample elsewhere, the checksums by which they are known to have the weights of `state`.
    """
    config = run.config.rl
    run.services.check_task_manifest(cursor.task_step)
    per_step, ended = _episodes_per_step(run), itertools.count(1)
    progress = Progress(config.steps * per_step, "episode", "RL", initial=cursor.task_step * per_step)
    trace = run.trace("rl")

    def on_step(completed: CompletedStep) -> None:
        if trace.ends(completed.step):
            trace.end()
            progress.update(0, trace=str(trace.folder))
        recorder.complete(completed)
        trace.begin(completed.step + 1)
        progress.update(per_step, step=completed.step, **_shown(completed.row))

    metrics = run.metrics("rl")
    ledger = RolloutLedger(run.path, run.workdir.require_held)
    replays = config.route_shape(run.config.model) is not None
    ledger.note_tokenizer(run.model.tokenizer.fingerprint)
    periodic = PeriodicEvaluation(run, "rl")
    publishing = _publishing(run, state, cursor)
    episodes = run.services.episode_context(return_routing=replays)
    with episodes as (context, loop), metrics, ledger, periodic, publishing as publisher:
        workers = run.services.rollout_workers(context)
        policy = _open_fleet(run, sampler, cursor, publisher) if isinstance(sampler, tuple) else sampler
        learner = update if process_count() == 1 else LeadingUpdate(update, policy)

        async def evaluate(step: int, version: int) -> None:
            show = lambda ended, total: progress.update(0, evaluated=f"{ended}/{total}")  # noqa: E731
            at_once, play = run.config.evaluate_at_once, workers.play_ahead
            await periodic.play(step, version, policy, context, play, at_once=at_once, on_done=show)

        source = GroupSource(config, run.config.agent, run.config.seed, run.services.tasks)
        watchers = Watchers(
            on_step,
            on_episode=lambda _: progress.update(0, ended=next(ended)),
            evaluate=evaluate,
            weight_check=_weight_check(run, learner, policy),
        )
        learning = Learning(learner, state, cursor, run.model.utilisation("rl"))
        playing = Playing(policy, context, workers.play, policy.of_version if isinstance(policy, FleetPolicy) else None)
        orchestrator = Orchestrator(config, source, learning, playing, ledger, watchers)
        metrics.truncate_after(len(ledger.batches))
        periodic.truncate_after(len(ledger.batches))
        recorder = _Recorder(run, source, store, metrics, ledger, policy, publisher, cursor)
        with _saving_at_an_interrupt(orchestrator, recorder), progress, trace:
            trace.begin(cursor.task_step + 1)
            loop.run(workers.serve(orchestrator.run()))
        broadcast_from_process0(lambda: False)


@contextlib.contextmanager
def _saving_at_an_interrupt(orchestrator: Orchestrator, recorder: "_Recorder") -> Iterator[None]:
    """Saves what the latest checkpoint does not have when the block ends with an error."""
    try:
        yield
    except BaseException as error:
        # After an interrupt the other processes have left the serving and wait for this; an error ends them.
        can_save = process_count() == 1 or isinstance(error, KeyboardInterrupt)
        # An error inside a step leaves nothing to save: the step has consumed the state that it started from.
        must_save = lambda: orchestrator.is_consistent and recorder.is_unsaved(orchestrator.cursor)  # noqa: E731
        if can_save and broadcast_from_process0(must_save):
            recorder.save(orchestrator.state, orchestrator.cursor)
        raise


def _open_fleet(
    run: Run, checksums: WeightChecksums, cursor: Cursor, publisher: BackgroundPublisher | None
) -> FleetPolicy:
    assert publisher is not None, "rl.engines needs rl.publish"
    plays_here = run.services.worker_options is None and process_count() == 1
    episodes = run.config.agent.concurrency if plays_here else None
    return open_fleet(run, publisher, cursor.weight_version, checksums, episodes)


def _weight_check(run: Run, learner: PolicyUpdate | LeadingUpdate, policy: Sampler | FleetPolicy) -> WeightCheck | None:
    config, sampler = run.config, run.config.sampler
    if not config.rl.weight_check_every:
        return None
    longest = config.rl.batches[0][0]
    if isinstance(policy, FleetPolicy):
        sampler = dataclasses.replace(sampler, param_dtype=PUBLISHED)
        longest = min(longest, sampler.max_model_len - 1)  # an engine scores a context, after which it samples a token
    tokens = check_row(config.seed, config.model, sampler, longest)
    return WeightCheck(learner, policy, tokens, gap_bound(config.rl, config.model, sampler))


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the progress of RL shows of a step's row, in few columns; the rates are tokens per second."""
    names = {"reward": "reward", "grade": "grade", "stale": "staleness_max", "queued": "groups_queued"}
    rates = {"sampled/s": ("sampled_tokens", "rollout_s"), "trained/s": ("trained_tokens", "train_s")}
    shown = {name: row[column] for name, column in names.items()}
    for name, (tokens, seconds) in rates.items():
        known = row.get(tokens) is not None and row[seconds]
        shown[name] = round(row[tokens] / row[seconds]) if known else None
    if row.get("mfu") is not None:
        shown["MFU"] = f"{row['mfu']:.1%}"
    return shown


def _follow(
    run: Run, update: PolicyUpdate, state: TrainState, cursor: Cursor, sampler: Sampler | None, store: CheckpointStore
) -> None:
    """What every process but the first does: it computes with process 0, plays its share and writes its shards."""
    position = cursor.to_json()

    def on_call(state: TrainState, header: Mapping[str, Any]) -> None:
        nonlocal position
        if header["publish"] is not None and publisher is not None:
            publisher.publish(state.params, state.router_bias, header["publish"])
        if "cursor" in header:
            position = header["cursor"]
            if header["save"]:
                save_state(store, state, position["task_step"], cursor=position)

    publishing = _publishing(run, state, cursor)
    with ignore_signals(), play_share(run.config.agent.concurrency), publishing as publisher:
        state = follow_update(
            update, sampler or LearnerFollower(), state, on_call
        )  # process 0 gets signals, too, and completes its step
    if broadcast_from_process0(lambda: False):
        save_state(store, state, position["task_step"], cursor=position)


def _publishing(
    run: Run, state: TrainState, cursor: Cursor
) -> contextlib.AbstractContextManager[BackgroundPublisher | None]:
    """Returns the publisher of the run's weights, which has published the ones that the run goes on with.

    Leaving it waits until the last version is written. Several processes call it alike.
    """
    if not run.config.rl.publish:
        return contextlib.nullcontext()
    if is_first_process():
        describe_versions(run.config.rl.publish, ModelDef(run.config.stage_model("rl")), str(run.path))
    barriers = itertools.count()
    publisher = BackgroundPublisher(
        WeightPublisher(
            run.config.rl.publish,
            process=process_index(),
            processes=process_count(),
            anchor_every=max(ANCHOR_EVERY, run.config.rl.max_staleness + 1),  # the versions since an anchor stay
            barrier=lambda: wait_at_barrier(f"publish/{next(barriers)}"),
        )
    )
    publisher.publish(state.params, state.router_bias, cursor.weight_version)
    publisher.wait()  # a folder that cannot be written is an error before anything is played
    return publisher


class _Recorder:
    """Writes what the steps of an RL run leave: metrics, records for the report, published weights, checkpoints."""

    def __init__(
        self,
        run: Run,
        source: GroupSource,
        store: CheckpointStore,
        metrics: MetricsWriter,
        ledger: RolloutLedger,
        policy: Sampler | FleetPolicy,
        publisher: BackgroundPublisher | None,
        cursor: Cursor,
    ):
        """cursor: the position that the run goes on from, whose weights are published. A fleet publishes by itself."""
        self._run, self._source, self._policy = run, source, policy
        self._store, self._metrics, self._ledger = store, metrics, ledger
        # The steps between the latest checkpoint and the last row of metrics are taken again, with the same result.
        rows = read_metrics(metrics.path)
        self._last_row = rows[-1]["step"] if rows else 0
        self._saved_step = cursor.task_step
        self._records_path = run.path / "episodes" / "rl.jsonl"
        old = read_episodes(self._records_path)
        self._records = [r for r in old if r.step is not None and r.step <= self._saved_step]
        self._publisher = None if isinstance(policy, FleetPolicy) else publisher
        self._skipped = SkippedSteps()

    def complete(self, completed: CompletedStep) -> None:
        """Writes what a step leaves.

        Raises UserError if the gradients of several steps in a row are not finite (train/loop.py: SkippedSteps).
        """
        config, state, cursor, step = self._run.config.rl, completed.state, completed.cursor, completed.step
        if step > self._last_row:
            self._metrics.write(step, **completed.row, **self._fleet_columns())
        if step % config.record_every == 0 or step == 1:
            self._records += first_episodes_of_each_family(self._run, self._source, completed.groups, step)
        publishes = cursor.weight_version if completed.is_updated and self._publisher is not None else None
        saves = step % config.save_every == 0 or step == config.steps
        self._policy.call_followers({"cursor": cursor.to_json(), "publish": publishes, "save": saves})
        if publishes is not None and self._publisher is not None:
            self._publisher.publish(state.params, state.router_bias, publishes)
        if saves:
            self.save(state, cursor)
        self._skipped.add(step, completed.row.get("skipped") or 0)
        self._skipped.require_progress()

    def _fleet_columns(self) -> dict[str, int]:
        return self._policy.metrics() if isinstance(self._policy, FleetPolicy) else {}

    def is_unsaved(self, cursor: Cursor) -> bool:
        """Whether the latest checkpoint is older than this position."""
        return cursor.task_step > self._saved_step

    def save(self, state: TrainState, cursor: Cursor) -> None:
        """Writes a checkpoint, together with the other processes.

        The store keeps two checkpoints; without rl.keep_groups, groups that the older one has learned from are deleted.
        """
        write_episodes(self._records_path, self._records)  # first: a resumed run drops the records after its checkpoint
        complete = save_state(self._store, state, cursor.task_step, cursor=cursor.to_json())
        learned = complete[0] if len(complete) > 1 else 0
        if cursor.task_step == self._run.config.rl.steps:
            self._store.wait()
            learned = cursor.task_step
        if not self._run.config.rl.keep_groups:
            self._ledger.forget(number for batch in self._ledger.batches[:learned] for number in batch.groups)
        self._saved_step = cursor.task_step


def _episodes_per_step(run: Run) -> int:
    return sum(run.config.rl.groups.values()) * run.config.rl.group_size


def first_episodes_of_each_family(
    run: Run, source: GroupSource, groups: Sequence[PlayedGroup], step: int
) -> list[EpisodeRecord]:
    """Returns records of the first two episodes of each family, for the report."""
    counts: Counter[str] = Counter()
    records = []
    for group in groups:
        by_episode: Sequence[NodeAdvantages | None] = [None] * len(group.episodes)
        if run.config.rl.record_tokens:
            by_episode = token_advantages(group.episodes, run.config.rl, step - 1)
        for spec, episode, advantages in zip(source.specs(group.number), group.episodes, by_episode, strict=True):
            counts[episode.family] += 1
            if counts[episode.family] <= 2:
                chosen = run.config.rl.family_compactions.get(episode.family, run.config.rl.compaction)
                condition = "none" if spec.compaction.trigger is None else chosen
                chat = run.model.chat
                records.append(build_episode_record(episode, spec.task, chat, condition, step, advantages))
    return records
