"""The RL stage: an interrupt between or inside steps loses nothing, and a resumed run uses up no task twice."""

import asyncio
import contextlib
import dataclasses
import json
import signal
import threading
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.transcript import Transcript
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.checkpoint.weight_chain import WeightPublisher, WeightReceiver
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop
from composer_jax.observe.metrics import MetricsWriter, read_metrics
from composer_jax.observe.step_trace import NO_TRACE
from composer_jax.rl import rollout
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.policy_update import UpdateResult
from composer_jax.rl.workers.worker_setup import WorkerSetup
from composer_jax.sampler.runner import RowScores
from composer_jax.schema.run_config import run_config
from composer_jax.stages import train_rl as stage
from composer_jax.stages.rollout_workers import RolloutWorkers
from composer_jax.storage.workdir import Workdir
from composer_jax.tasks.source import TaskSource
from composer_jax.train.learner import TrainState
from configs.tiny import get_config
from tests.rl.simulated import Play, SimulatedPolicy

STEPS = 5


class FakeLearner:
    def init_state(self, params, router_bias):
        return TrainState({"w": params["w"] + 0}, {}, {}, jnp.int32(0))


class Interrupter:
    """Sends Ctrl-C to the main thread, once, when a place is reached."""

    def __init__(self):
        self.place, self.played, self.evaluated, self.has_nan = None, [], [], False

    def reach(self, *place):
        if place == self.place:
            self.place = None
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.1)  # as a real step, this one does not end before the main thread has the signal


class FakePolicy(SimulatedPolicy):
    async def update_serving(self, params, router_bias, version, *, mode, checksums):
        assert params["w"].tolist() == [version] * 3
        assert checksums == self.learner_checksums(params), "those of the learner's new weights"
        self.version = version

    def learner_checksums(self, params):
        return tuple(params["w"].tolist())

    def score(self, tokens):
        assert not self.running.is_set(), "the policy computes while it scores a row"
        return RowScores(np.full((2, len(tokens) - 1), -float(self.version), np.float32), None)

    def call_followers(self, header):
        assert not self.running.is_set(), "the policy computes while a step is completed"


class FakeUpdate:
    """Adds one to the weight per step and, as the real one, uses up the state it is given."""

    def __init__(self, interrupter):
        self.interrupter = interrupter

    def set_reference(self, params, router_bias):
        assert params["w"].tolist() == [0.0] * 3, "the weights that RL started from"

    def step(self, state, groups, episodes, step):
        has_nan = self.interrupter.has_nan
        new = TrainState({"w": state.params["w"] + (not has_nan)}, {}, {}, state.step + 1)
        state.params["w"].delete()
        state.step.delete()
        self.interrupter.reach("learn", int(new.step))
        return new, UpdateResult(not has_nan, {"skipped": float(has_nan)}, self.learner_checksums(new.params))

    def score(self, state, tokens, routing):
        return np.full(len(tokens), 0.01 - float(state.params["w"][0]), np.float32)


def sampler_with(params, router_bias, version):
    policy = FakePolicy(lambda seed: Play(turn_s=0.0))
    policy.version = version
    return policy


def fake_harness(interrupter):
    async def run_episode(spec, session, context):
        task, seed = spec.task, spec.seed
        place, tasks = ("suite", interrupter.evaluated) if task.split == "heldout" else ("play", interrupter.played)
        tasks.append(task.id)
        interrupter.reach(place, len(tasks))
        transcript = Transcript()
        transcript.append("prompt", [1, 2])
        sample = await session.sample([*transcript.tokens, 5], SamplingParams(2))
        transcript.append("assistant", [5], sample.tokens, sample.logprobs, sample.versions)
        return Episode(task.id, task.family, task.split, seed, transcript, seed % 2, "finished", turns=1)

    return run_episode


@contextlib.contextmanager
def episode_context(**_):
    with EventLoop() as loop:
        yield EpisodeContext(None, None), loop


@pytest.fixture(params=[0, 2], ids=["synchronous", "asynchronous"])
def train_rl(tmp_path, monkeypatch, request):
    """(where Ctrl-C comes or None, whether gradients are NaN) -> runs the stage in one folder, again and again."""
    interrupter = Interrupter()
    monkeypatch.setattr(rollout, "run_episode", fake_harness(interrupter))
    monkeypatch.setattr(stage, "PolicyUpdate", lambda *_: FakeUpdate(interrupter))
    monkeypatch.setattr(stage, "first_episodes_of_each_family", lambda *_: [])
    config = run_config(get_config("smoke"))
    changes = dict(steps=STEPS, save_every=3, max_staleness=request.param, weight_check_every=2)
    rl = dataclasses.replace(config.rl, publish=str(tmp_path / "published"), **changes)
    config = dataclasses.replace(config, rl=rl)
    with Workdir(tmp_path / "run", {}) as workdir:

        @contextlib.contextmanager
        def in_stage(name):
            result = {}
            yield result
            workdir.mark_done(name, result)

        model = types.SimpleNamespace(
            chat=None,
            tokenizer=types.SimpleNamespace(fingerprint="of a test"),
            weights_before=lambda _: ({"w": jnp.zeros(3)}, {}),
            learner=lambda stage, training: FakeLearner(),
            require_stage=lambda stage: None,
            utilisation=lambda stage: None,
            store=lambda name: CheckpointStore(workdir.path / "checkpoints" / name, keep=2),
        )
        services = types.SimpleNamespace(
            episode_context=episode_context,
            tasks=TaskSource(0, config.tasks),
            check_task_manifest=lambda step: None,
            sampler_with=sampler_with,
            rollout_workers=lambda context: RolloutWorkers(None, WorkerSetup, context),
        )
        run = types.SimpleNamespace(
            workdir=workdir,
            path=workdir.path,
            is_done=workdir.stage_done,
            config=config,
            stage=in_stage,
            model=model,
            services=services,
            interrupter=interrupter,
            metrics=lambda name: MetricsWriter(workdir.path / "metrics" / f"{name}.jsonl"),
            trace=lambda stage: NO_TRACE,
            stage_mesh=lambda stage: types.SimpleNamespace(local_devices=()),
        )

        def go(place=None, has_nan=False, every=(), heldout="", save_every=3):
            """every: evaluate.every, with half of the slots for suites. heldout: tasks.heldout."""
            interrupter.place, interrupter.has_nan = place, has_nan
            evaluate = dataclasses.replace(config.evaluate, every=dict(every), slots_fraction=0.5)
            tasks = dataclasses.replace(config.tasks, heldout=heldout)
            rl = dataclasses.replace(config.rl, save_every=save_every)
            run.config = dataclasses.replace(config, evaluate=evaluate, tasks=tasks, rl=rl)
            stage.train_rl(run)
            return run

        yield go


def weights_and_steps(run):
    with run.model.store("rl") as store:
        arrays, _ = store.restore(like={"params": {"w": np.zeros(3, np.float32)}})
    return arrays["params"]["w"].tolist(), [row["step"] for row in read_metrics(run.path / "metrics" / "rl.jsonl")]


def published(run) -> dict[int, list[float]]:
    """The weights of every version that a server can take."""
    receiver = WeightReceiver(run.config.rl.publish)
    versions = {}
    for version in range(run.config.rl.steps + 1):
        with contextlib.suppress(UserError):
            receiver.receive(version)
            versions[version] = receiver.arrays["params/w"].tolist()
    assert receiver.arrays["params/w"].dtype == jnp.bfloat16
    return versions


def batches(run) -> list[str]:
    return (run.path / "batches.jsonl").read_text().splitlines()


def groups(run) -> int:
    return STEPS * sum(run.config.rl.groups.values())


def test_an_uninterrupted_stage(train_rl):
    run = train_rl()
    assert weights_and_steps(run) == ([5.0] * 3, [1, 2, 3, 4, 5])
    assert len(run.interrupter.played) == groups(run) * run.config.rl.group_size
    assert len(set(run.interrupter.played)) == groups(run) and len(batches(run)) == STEPS
    assert not list((run.path / "rl" / "groups").iterdir())
    rows = read_metrics(run.path / "metrics" / "rl.jsonl")
    gaps = [row["weight_gap"] for row in rows]  # at the beginning, after two steps and after four
    assert [gap is not None for gap in gaps] == [True, True, False, True, False]
    assert gaps[0] == pytest.approx(0.01, abs=1e-6)
    result = run.workdir.stage_result("rl")
    assert result["weight_gap_max"] == max(gap for gap in gaps if gap is not None)
    assert {name: result[name] for name in stage.TOTALS} == {
        name: pytest.approx(sum(row[name] for row in rows)) for name in stage.TOTALS
    }


def test_groups_stay_until_both_complete_checkpoints_have_learned_from_them(train_rl, monkeypatch, tmp_path):
    """While a checkpoint is written, the run may go on from the one before, and from the one before that."""
    may_write, forgotten = threading.Event(), []
    save, forget, open_array = CheckpointStore.save, RolloutLedger.forget, tensorstore.open

    async def open_later(*args, **options):
        assert await asyncio.to_thread(may_write.wait, 60)
        return await open_array(*args, **options)

    def save_later(store, step, **content):
        may_write.clear() if step < STEPS else may_write.set()
        save(store, step, **content)

    def check_and_forget(ledger, numbers):
        forgotten.append(list(numbers))
        steps = sorted(int(path.name) for path in (tmp_path / "run/checkpoints/rl").iterdir() if path.name.isdigit())
        oldest = 0 if len(steps) < 2 else STEPS if STEPS in steps else steps[0]
        try:
            assert set(forgotten[-1]) <= {number for batch in ledger.batches[:oldest] for number in batch.groups}
            forget(ledger, forgotten[-1])
        finally:
            may_write.set()

    monkeypatch.setattr(tensorstore, "open", open_later)
    monkeypatch.setattr(CheckpointStore, "save", save_later)
    monkeypatch.setattr(RolloutLedger, "forget", check_and_forget)
    per_step = groups(train_rl(save_every=1)) // STEPS
    assert [len(numbers) for numbers in forgotten] == [0, 0, per_step, 2 * per_step, STEPS * per_step]


def test_a_run_that_goes_on_keeps_the_groups_that_the_older_checkpoint_needs(train_rl, monkeypatch, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train_rl(("learn", 3), save_every=1)
    steps = sorted(int(path.name) for path in (tmp_path / "run/checkpoints/rl").iterdir() if path.name.isdigit())
    assert len(steps) == 2, "the run goes on from the second"
    forgotten, forget = [], RolloutLedger.forget

    def note_and_forget(ledger, numbers):
        forgotten.append(list(numbers))
        forget(ledger, forgotten[-1])

    monkeypatch.setattr(RolloutLedger, "forget", note_and_forget)
    per_step = groups(train_rl(save_every=1)) // STEPS
    assert len(forgotten[0]) == steps[0] * per_step


def test_versions_are_written_while_the_policy_samples(train_rl, monkeypatch):
    """Only the copy to the host is taken while the policy is paused."""
    samples, publish, resume = threading.Event(), WeightPublisher.publish, FakePolicy.resume

    def note_resume(self):
        resume(self)
        if self.version == 1:
            samples.set()

    def publish_while_sampling(self, shards, version):
        assert version != 1 or samples.wait(20), "the policy waits for the write"
        return publish(self, shards, version)

    monkeypatch.setattr(FakePolicy, "resume", note_resume)
    monkeypatch.setattr(WeightPublisher, "publish", publish_while_sampling)
    assert published(train_rl()) == {version: [float(version)] * 3 for version in range(STEPS + 1)}


PLACES = [*(("play", n) for n in (1, 20, 40, 70)), *(("learn", step) for step in (1, 2, 4, 5))]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_ctrl_c_anywhere_loses_no_step(train_rl, place):
    with pytest.raises(KeyboardInterrupt):
        train_rl(place)
    run = train_rl()
    assert weights_and_steps(run) == ([5.0] * 3, [1, 2, 3, 4, 5])
    trained = [task for line in batches(run) for task in json.loads(line)["tasks"]]
    assert len(trained) == len(set(trained)) == groups(run)
    # Only episodes of groups that were cut short are played again.
    per_group = run.config.rl.group_size
    again = len(run.interrupter.played) - groups(run) * per_group
    assert again <= (run.config.rl.max_staleness + 1) * sum(run.config.rl.groups.values()) * per_group
    assert place[0] == "play" or run.config.rl.max_staleness or again == 0
    assert published(run) == {version: [float(version)] * 3 for version in range(6)}


EVERY = {"bugfix": 2, "chain": 4}
EVALUATED = [(2, "bugfix"), (4, "bugfix"), (4, "chain")]


def evaluated(run) -> list[tuple[int, str]]:
    """(step, suite) of every row of a suite, whose version is that of the step."""
    rows = read_metrics(run.path / "metrics" / "evaluate_rl.jsonl")
    assert all(row["version"] == row["step"] for row in rows)
    assert all(row["tokens_bugfix"] == 2 * 4 and row["lost_bugfix"] == 0 for row in rows if "tokens_bugfix" in row)
    return sorted((row["step"], name) for row in rows for name in EVERY if f"pass_at_1_{name}" in row)


def test_suites_run_after_their_steps(train_rl):
    run = train_rl(every=EVERY)
    assert evaluated(run) == EVALUATED
    assert weights_and_steps(run) == ([5.0] * 3, [1, 2, 3, 4, 5])
    row = next(row for row in read_metrics(run.path / "metrics" / "evaluate_rl.jsonl") if "low_chain" in row)
    assert 0 <= row["low_chain"] <= row["pass_at_1_chain"] <= row["high_chain"] <= 1 and row["seconds_chain"] > 0


@pytest.mark.parametrize("n", [1, 4, 6, 12])
def test_ctrl_c_inside_a_suite_leaves_no_row_out_and_writes_none_twice(train_rl, n):
    """Four episodes of suites play after step 2, and eight after step 4."""
    with pytest.raises(KeyboardInterrupt):
        train_rl(("suite", n), every=EVERY)
    run = train_rl(every=EVERY)
    assert evaluated(run) == EVALUATED
    assert weights_and_steps(run) == ([5.0] * 3, [1, 2, 3, 4, 5])
    assert len(batches(run)) == STEPS


def test_a_suite_of_a_family_that_is_not_on_disk_is_refused(train_rl):
    with pytest.raises(UserError, match="evaluate.every names the suite 'heldout_bugs'; there are bugfix, chain, "):
        train_rl(every={"heldout_bugs": 1}, heldout="tasks")


def test_sampler_and_learner_that_disagree_end_the_stage_also_when_it_goes_on(train_rl, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        train_rl(("learn", 2))
    monkeypatch.setattr(FakeUpdate, "score", lambda *_: np.full(64, np.nan, np.float32))
    with pytest.raises(UserError, match="version 2: the median gap of a fixed row of 64 tokens is nan"):
        train_rl()
    monkeypatch.undo()


def test_three_skipped_steps_in_a_row_end_the_stage(train_rl):
    """The third is saved; the same command goes on after it."""
    with pytest.raises(UserError, match="nothing was learned in steps 1 to 3, because their gradients are not finite"):
        train_rl(has_nan=True)
    run = train_rl()
    assert weights_and_steps(run) == ([2.0] * 3, [1, 2, 3, 4, 5])


def test_the_progress_of_a_step_fits_a_line():
    row = {"reward": 0.5, "grade": 0.25, "staleness_max": 1, "groups_queued": 0, "sampled_tokens": 1000}
    row |= {"rollout_s": 2.0, "trained_tokens": 900, "train_s": 0.0}
    shown = stage._shown(row)
    assert shown == {"reward": 0.5, "grade": 0.25, "stale": 1, "queued": 0, "sampled/s": 500, "trained/s": None}
    assert stage._shown(row | {"sampled_tokens": None})["sampled/s"] is None
    assert stage._shown(row | {"mfu": 0.375})["MFU"] == "37.5%"
    assert stage._shown(row | {"mfu": None}) == shown
