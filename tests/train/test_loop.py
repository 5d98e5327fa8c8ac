"""fit(): a run that was interrupted anywhere, in any way, ends like one that never was: bit for bit."""

import asyncio
import contextlib
import dataclasses
import math
import shutil
import signal
import sys
import threading
from functools import partial

import chex
import jax
import numpy as np
import pytest
import tensorstore

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.data.pipeline import heldout_batches, pretraining_batches
from composer_jax.data.token_source import DocumentSource
from composer_jax.errors import UserError
from composer_jax.models.flops import document_lengths, training_flops
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.metrics import MetricsWriter, read_metrics
from composer_jax.observe.step_trace import StepTrace
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train import interrupt, loop
from composer_jax.train.interrupt import AllProcessesInterrupted, defer_signals
from composer_jax.train.learner import Learner
from composer_jax.train.loop import FitPlan, fit
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from composer_jax.train.utilisation import Utilisation
from tests.models.small import LLAMA, random_weights, small

CONFIG = small(n_layers=2, n_mtp_modules=0, embedding_taps=0, d_model=16, kv_lora_rank=8)
STEPS = 6
PLAN = FitPlan("test", STEPS, save_every=2, evaluate_every=3)
DOCUMENTS = [np.random.default_rng(i).integers(9, 64, 20 + i) for i in range(12)]


def make_learner():
    # With Adam's usual eps the rounding of a gradient near zero would decide the sign of a whole step.
    optimizer = make_optimizer(OptimizerConfig(peak=0.01, warmup=2, eps=0.1), STEPS)
    loss = LanguageLoss(LanguageLossConfig(balance_weight=0.1))
    return Learner(ModelDef(CONFIG), optimizer, loss, make_mesh(jax.devices()[:1]), router_bias_update_rate=0.01)


@pytest.fixture(scope="module")
def learner():
    return make_learner()


@pytest.fixture(scope="module")
def weights():
    return random_weights(CONFIG)


def new_stream(**changes):
    source = DocumentSource(DOCUMENTS, eod=2)
    return pretraining_batches({"documents": (source, 1.0)}, **(dict(seq_len=16, batch_size=2, seed=0) | changes))


def heldout():
    return heldout_batches(DOCUMENTS[:2], seq_len=16, batch_size=2, eod=2)


class Driver:
    """A Learner that lets a test act at a call: `at` maps ("start_step" or "evaluate", number from 1) to an action,
    which is called with the real call as a function."""

    def __init__(self, learner, at=None):
        self.learner, self.at, self.calls = learner, at or {}, {"start_step": 0, "evaluate": 0}
        self.host_reduction = learner.host_reduction

    def start_step(self, *args, **kwargs):
        return self._call("start_step", args, kwargs)

    def evaluate(self, *args):
        return self._call("evaluate", args, {})

    def _call(self, name, args, kwargs):
        self.calls[name] += 1
        action = self.at.get((name, self.calls[name]))

        def real():
            return getattr(self.learner, name)(*args, **kwargs)

        return action(real) if action else real()


def run(folder, learner, weights, stream=None, at=None, plan=PLAN, **options):
    """One attempt. Returns the final state (NumPy), the metrics, and the batch that the stream would give next."""
    stream = stream or new_stream()
    with CheckpointStore(folder / "checkpoints", keep=1) as store, MetricsWriter(folder / "metrics.jsonl") as metrics:
        state = fit(
            Driver(learner, at),
            learner.init_state(*weights),
            stream,
            plan,
            store=store,
            metrics=metrics,
            heldout=heldout,
            **options,
        )
    return jax.tree.map(np.asarray, state), rows(folder), next(stream)


def rows(folder):
    """Metrics without the clock."""
    kept = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in ("time", "tokens_per_s")} for row in kept]


def assert_same(actual, expected):
    chex.assert_trees_all_equal(actual[0], expected[0])
    assert actual[1] == expected[1]
    for name, values in vars(expected[2]).items():
        np.testing.assert_array_equal(getattr(actual[2], name), values)


@pytest.fixture(scope="module")
def uninterrupted(learner, weights, tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), learner, weights)


class Killed(BaseException):
    """Stands for a process that is gone: nothing of it runs on, so nothing is saved."""


def killed(real):
    raise Killed


@contextlib.contextmanager
def saving_nothing_when_killed():
    real_save = loop.save_state

    def save_unless_dead(*args, **kwargs):
        if not isinstance(sys.exception(), Killed):
            real_save(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_state", save_unless_dead)
        yield


def ctrl_c(real):
    """In the middle of a call: its arguments are donated, its result is not stored yet."""
    result = real()
    signal.raise_signal(signal.SIGINT)
    return result


def broken(real):
    raise ZeroDivisionError


def test_an_uninterrupted_run_has_a_row_for_every_step(uninterrupted):
    state, metrics, _ = uninterrupted
    assert int(state.step) == STEPS
    assert [row["step"] for row in metrics] == list(range(STEPS + 1))
    assert [row["step"] for row in metrics if "heldout_nll" in row] == [0, 3, 6]
    # Every position of these rows is a real token.
    assert [row["tokens"] for row in metrics] == [32 * step for step in range(STEPS + 1)]
    assert metrics[1].keys() >= {"loss", "learning_rate", "grad_norm", "load_imbalance"}
    entropies = [row["heldout_router_entropy"] for row in metrics if "heldout_nll" in row]
    assert all(0.5 * math.log(8) < entropy <= math.log(8) for entropy in [*entropies, metrics[1]["router_entropy"]])
    assert all(row["heldout_dropped"] == 0 for row in metrics if "heldout_nll" in row)


def test_the_loss_of_other_heldout_data_is_measured_beside_it(tmp_path, learner, weights, uninterrupted):
    state, metrics, _ = run(tmp_path, learner, weights, heldout_sources={"other": heldout})
    chex.assert_trees_all_equal(state, uninterrupted[0])
    for name in ("nll", "router_entropy", "dropped"):
        assert [row.get(f"heldout_other_{name}") for row in metrics] == [row.get(f"heldout_{name}") for row in metrics]


def test_a_row_has_its_share_of_the_peak(tmp_path, learner, weights):
    plan = dataclasses.replace(PLAN, steps=2, utilisation=Utilisation(CONFIG, peak=1e12))
    run(tmp_path, learner, weights, plan=plan)
    stream = new_stream()
    for row in read_metrics(tmp_path / "metrics.jsonl")[1:]:
        lengths = document_lengths(next(stream).segments)
        seconds = 32 / row["tokens_per_s"]
        assert row["mfu"] == pytest.approx(training_flops(CONFIG, lengths) / seconds / 1e12)


def test_a_trace_of_some_steps_changes_no_bit(tmp_path, learner, weights, uninterrupted, profiler):
    trace = StepTrace(tmp_path / "trace", range(3, 5))
    seen = []
    at = {("start_step", step): lambda real: (seen.append(len(profiler)), real())[1] for step in range(1, 7)}
    assert_same(run(tmp_path, learner, weights, at=at, trace=trace), uninterrupted)
    assert seen == [0, 0, 1, 1, 2, 2]
    assert profiler == [("start", tmp_path / "trace"), ("stop", None)] and trace.is_written


def test_a_trace_ends_with_a_run_that_was_interrupted(tmp_path, learner, weights, profiler):
    trace = StepTrace(tmp_path / "trace", range(2, 6))
    with saving_nothing_when_killed(), pytest.raises(Killed):
        run(tmp_path, learner, weights, at={("start_step", 4): killed}, trace=trace)
    assert [what for what, _ in profiler] == ["start", "stop"]


def test_a_network_without_experts_resumes_bit_for_bit(tmp_path):
    config = small(**LLAMA, n_layers=2)
    optimizer = make_optimizer(OptimizerConfig(peak=0.01, warmup=2), STEPS)
    learner = Learner(
        ModelDef(config), optimizer, LanguageLoss(), make_mesh(jax.devices()[:1]), router_bias_update_rate=0.01
    )
    weights = random_weights(config)
    expected = run(tmp_path / "whole", learner, weights)
    with pytest.raises(Killed):
        run(tmp_path / "killed", learner, weights, at={("start_step", 5): killed})
    assert_same(run(tmp_path / "killed", learner, weights), expected)
    assert "load_imbalance" not in expected[1][1] and "dropped" not in expected[1][1]


@pytest.mark.parametrize("step", [1, 3, 4, STEPS])
def test_a_killed_run_resumes_bit_for_bit(tmp_path, learner, weights, uninterrupted, step):
    with saving_nothing_when_killed(), pytest.raises(Killed):
        run(tmp_path, learner, weights, at={("start_step", step): killed})
    assert_same(run(tmp_path, learner, weights), uninterrupted)


def test_kill_9_while_a_checkpoint_is_written_beside_training_loses_nothing(
    tmp_path, learner, weights, uninterrupted, monkeypatch
):
    """Step 5 is complete and the checkpoint of step 4 is not: a run resumes from step 2 on what kill -9 would leave,
    which is a copy of the folder. (tests/checkpoint/test_store.py kills a process inside a save.)"""
    may_write, save, open_array = threading.Event(), CheckpointStore.save, tensorstore.open

    async def open_later(*args, **options):
        assert await asyncio.to_thread(may_write.wait, 60)
        return await open_array(*args, **options)

    def save_without_end(store, step, **content):
        store.wait()
        if step == 4:
            monkeypatch.setattr(tensorstore, "open", open_later)
        save(store, step, **content)

    def copy_folder(real):
        real()[0].step.block_until_ready()
        shutil.copytree(tmp_path / "killed", tmp_path / "left")
        may_write.set()
        raise Killed

    monkeypatch.setattr(CheckpointStore, "save", save_without_end)
    with saving_nothing_when_killed(), pytest.raises(Killed):
        run(tmp_path / "killed", learner, weights, at={("start_step", 5): copy_folder})
    monkeypatch.undo()
    with CheckpointStore(tmp_path / "left" / "checkpoints") as store:
        assert store.steps() == [2]
    assert any(path.name.startswith("4.") for path in (tmp_path / "left/checkpoints").iterdir()), "it was being written"
    assert_same(run(tmp_path / "left", learner, weights), uninterrupted)


def test_a_state_is_freed_before_another_one_is_read(tmp_path, learner, weights, monkeypatch):
    """Two would not fit on the devices; the caller's variable would hold the first to the end of the run."""
    state, is_freed = learner.init_state(*weights), []
    with CheckpointStore(tmp_path) as store:
        assert loop.restore_state(store, state) is None
        loop.save_state(store, state)
        restore = store.restore

        def note_and_restore(**options):
            is_freed.extend(leaf.is_deleted() for leaf in jax.tree.leaves(state))
            return restore(**options)

        monkeypatch.setattr(store, "restore", note_and_restore)
        restored = loop.restore_state(store, state)
    assert is_freed and all(is_freed)
    assert restored is not None
    chex.assert_trees_all_equal(restored[0], learner.init_state(*weights))


@pytest.mark.parametrize("call", [*[("start_step", n) for n in (1, 4, 6)], *[("evaluate", n) for n in (1, 2, 3)]])
def test_ctrl_c_anywhere_loses_no_step(tmp_path, learner, weights, uninterrupted, call):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, learner, weights, at={call: ctrl_c})
    done = {"start_step": call[1], "evaluate": 3 * (call[1] - 1)}[call[0]]
    with CheckpointStore(tmp_path / "checkpoints") as store:
        assert store.latest_step() == (done or None)
    assert [row["step"] for row in rows(tmp_path)] == list(range(done + 1))
    assert_same(run(tmp_path, learner, weights), uninterrupted)


def test_ctrl_c_while_waiting_for_data_loses_no_step(tmp_path, learner, weights, uninterrupted):
    class Stream:
        def __init__(self):
            self.inner, self.taken = new_stream(), 0
            self.get_state, self.set_state = self.inner.get_state, self.inner.set_state

        def __next__(self):
            self.taken += 1
            if self.taken == 4:
                next(self.inner)  # the batch is lost, the place in the stream must not be
                raise KeyboardInterrupt
            return next(self.inner)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, learner, weights, stream=Stream())
    with CheckpointStore(tmp_path / "checkpoints") as store:
        assert store.latest_step() == 3
    assert_same(run(tmp_path, learner, weights), uninterrupted)


class WithNan:
    """A stream whose batches with these numbers, from 1, have a loss that is not a number."""

    def __init__(self, *numbers):
        self.inner, self.numbers, self.taken = new_stream(), numbers, 0
        self.get_state, self.set_state = self.inner.get_state, self.inner.set_state

    def __next__(self):
        batch = next(self.inner)
        self.taken += 1
        if self.taken in self.numbers:
            return dataclasses.replace(batch, weights=batch.weights * np.nan)
        return batch


def test_two_skipped_steps_in_a_row_are_counted_and_the_run_goes_on(tmp_path, learner, weights):
    _, metrics, _ = run(tmp_path, learner, weights, stream=WithNan(1, 2, 4, 5))
    assert [row.get("skipped") for row in metrics] == [None, 1, 1, 0, 1, 1, 0]


def test_three_skipped_steps_in_a_row_end_the_run_with_the_last_good_weights(tmp_path, learner, weights):
    with pytest.raises(UserError, match="nothing was learned in steps 3 to 6, because"):
        run(tmp_path / "broken", learner, weights, stream=WithNan(3, 4, 5, 6))
    assert [row.get("skipped") for row in rows(tmp_path / "broken")] == [None, 0, 0, 1, 1, 1, 1]
    good, _, _ = run(tmp_path / "good", learner, weights, plan=FitPlan("test", 2, save_every=2, evaluate_every=3))
    with CheckpointStore(tmp_path / "broken" / "checkpoints") as store:
        saved = store.restore(like={"params": jax.eval_shape(lambda: weights[0])})[0]["params"]
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, saved), good.params)


@pytest.fixture
def two_processes(monkeypatch):
    """As if there were another process, which is interrupted when `True` is put into the list."""
    others = []
    for module in (loop, interrupt):
        monkeypatch.setattr(module, "process_count", lambda: 2)
    monkeypatch.setattr(interrupt, "any_process", lambda here: here or bool(others and others.pop()))
    return others


def test_an_interrupt_of_another_process_stops_and_saves_after_the_same_step(
    tmp_path, learner, weights, uninterrupted, two_processes
):
    def elsewhere(real):
        two_processes.append(True)
        return real()

    with pytest.raises(AllProcessesInterrupted):
        run(tmp_path, learner, weights, at={("start_step", 3): elsewhere})
    with CheckpointStore(tmp_path / "checkpoints") as store:
        assert store.latest_step() == 3
    assert_same(run(tmp_path, learner, weights), uninterrupted)


def test_an_error_in_one_of_several_processes_saves_nothing(tmp_path, learner, weights, uninterrupted, two_processes):
    stream, taken = new_stream(), iter(range(3))

    class Stream:
        get_state, set_state = stream.get_state, stream.set_state

        def __next__(self):
            next(taken)  # raises StopIteration at the fourth
            return next(stream)

    with pytest.raises(StopIteration):
        run(tmp_path, learner, weights, stream=Stream())
    with CheckpointStore(tmp_path / "checkpoints") as store:
        assert store.latest_step() == 2
    assert_same(run(tmp_path, learner, weights), uninterrupted)


def test_batches_that_are_not_those_of_process_0_are_refused(tmp_path, learner, weights, monkeypatch):
    changes = {
        "stream": lambda stream: stream | {"documents.tokens": 1},  # other data, whose rows this process does not read
        "fields": lambda checksums: [*checksums[:-1], checksums[-1] ^ 1],
        "rows": lambda checksums: [checksums[0], checksums[1] ^ 1],
    }

    def changed(name, change, call):
        return call() | {name: change(call()[name])}

    for name, change in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(loop, "broadcast_from_process0", partial(changed, name, change))
            with pytest.raises(UserError, match="makes other batches than process 0"):
                run(tmp_path / name, learner, weights)
        assert [row["step"] for row in rows(tmp_path / name)] == [0]


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, learner, weights, uninterrupted):
    def twice(real):
        ctrl_c(real)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second Ctrl-C was deferred as well")

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, learner, weights, at={("start_step", 4): twice})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(run(tmp_path, learner, weights), uninterrupted)


def test_sigterm_is_deferred_where_ctrl_c_is_ignored():
    """As in the background of a script, where SIGTERM is the only way to be asked to stop."""

    def stop(number, frame):
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    done = []
    try:
        with pytest.raises(KeyboardInterrupt), defer_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            done.append(True)
        assert done and signal.getsignal(signal.SIGTERM) is stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fails_late(real):
    """After a step has donated its state."""
    real()
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("call", "action"), [(("start_step", 4), broken), (("evaluate", 2), broken), (("start_step", 4), fails_late)]
)
def test_an_error_is_raised_unchanged_and_the_run_resumes(tmp_path, learner, weights, uninterrupted, call, action):
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, learner, weights, at={call: action})
    assert_same(run(tmp_path, learner, weights), uninterrupted)


def test_a_step_starts_before_the_metrics_of_the_step_before_are_fetched(tmp_path, learner, weights):
    """Unless that step was evaluated or saved: its row is written with it."""
    written = {}

    def note(step):
        def action(real):
            written[step] = [row["step"] for row in rows(tmp_path)]
            return real()

        return action

    plan = FitPlan("test", STEPS, save_every=4, evaluate_every=5)
    run(tmp_path, learner, weights, at={("start_step", n): note(n) for n in range(1, STEPS + 1)}, plan=plan)
    assert written == {1: [0], 2: [0], 3: [0, 1], 4: [0, 1, 2], 5: [0, 1, 2, 3, 4], 6: [0, 1, 2, 3, 4, 5]}


def test_a_finished_run_does_nothing_more(tmp_path, learner, weights, uninterrupted):
    run(tmp_path, learner, weights)
    at = {("start_step", 1): broken, ("evaluate", 1): broken}
    assert_same(run(tmp_path, learner, weights, at=at), uninterrupted)


def test_metrics_after_the_checkpoint_are_cut(tmp_path, learner, weights, uninterrupted):
    """A kill after step 5 leaves its row, but the checkpoint is of step 4."""
    with pytest.raises(Killed):
        with pytest.MonkeyPatch.context() as patch:
            real_save = loop.save_state
            patch.setattr(loop, "save_state", lambda *a, **k: real_save(*a, **k) if int(a[1].step) % 2 == 0 else None)
            run(tmp_path, learner, weights, at={("start_step", 6): killed})
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]
    actual = run(tmp_path, learner, weights)
    assert_same(actual, uninterrupted)


def test_a_resumed_run_refuses_other_data(tmp_path, learner, weights):
    with pytest.raises(Killed):
        run(tmp_path, learner, weights, at={("start_step", 4): killed})
    with pytest.raises(UserError, match="other data.*batch_size was 2 and is 4"):
        run(tmp_path, learner, weights, stream=new_stream(batch_size=4))


def test_restored_weights_are_on_the_devices_they_belong_to(tmp_path, learner, weights):
    """On another mesh than the one that saved."""
    run(tmp_path, learner, weights, plan=FitPlan("test", 2, 2, 2))
    mesh = make_mesh(jax.devices()[:2], data=2)
    other = Learner(ModelDef(CONFIG), learner.optimizer, LanguageLoss(), mesh, router_bias_update_rate=0.01)
    like = other.init_state(*weights)
    with CheckpointStore(tmp_path / "checkpoints") as store:
        state, json = loop.restore_state(store, like)
    assert int(state.step) == 2 and json["tokens"] == 64
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, state, like))


# -- micro-batches --------------------------------------------------------------------------------------------------


def test_micro_batches_are_one_batch(tmp_path, learner, weights):
    """Weights, moments, router bias and metrics; a resumed run has the bits of one that was not interrupted."""
    plan = dataclasses.replace(PLAN, steps=3)
    whole, whole_rows, _ = run(tmp_path / "whole", learner, weights, plan=plan)
    plan = dataclasses.replace(plan, accumulate=2)
    parts, parts_rows, following = run(tmp_path / "parts", learner, weights, plan=plan)
    chex.assert_trees_all_close(parts.params, whole.params, atol=1e-6, rtol=1e-6)
    chex.assert_trees_all_close(parts.optimizer, whole.optimizer, atol=1e-6, rtol=1e-6)
    chex.assert_trees_all_equal(parts.router_bias, whole.router_bias)
    for a, b in zip(parts_rows, whole_rows, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    run(tmp_path / "resumed", learner, weights, plan=dataclasses.replace(plan, steps=2))
    resumed = run(tmp_path / "resumed", learner, weights, plan=plan)
    chex.assert_trees_all_equal(resumed[0], parts)
    np.testing.assert_array_equal(resumed[2].tokens, following.tokens)


# -- an evaluation after some steps ---------------------------------------------------------------------------------


class Evaluation:
    """A StepEvaluation after steps 3, 4 and 6: a number of the weights of each."""

    def __init__(self, at=None):
        self.at, self.done, self.began = at or {}, {}, []

    def truncate_after(self, step):
        self.done = {done: value for done, value in self.done.items() if done <= step}

    def is_due(self, step):
        return step in (3, 4, 6)

    def run(self, step, state):
        if step in self.done:
            return
        self.began.append(step)
        assert int(state.step) == step
        if action := self.at.pop(len(self.began), None):
            action(lambda: None)
        self.done[step] = float(jax.tree.leaves(state.params)[0].sum())


def test_an_evaluation_after_steps_changes_no_bit(tmp_path, learner, weights, uninterrupted):
    evaluation = Evaluation()
    assert_same(run(tmp_path, learner, weights, evaluation=evaluation), uninterrupted)
    assert evaluation.began == [3, 4, 6] and len(set(evaluation.done.values())) == 3


@pytest.mark.parametrize(("action", "n"), [(killed, 1), (ctrl_c, 2), (killed, 3)])
def test_an_evaluation_that_is_cut_short_runs_again(tmp_path, learner, weights, uninterrupted, action, n):
    """Checkpoints are of steps 2, 4 and 6. Step 4 is evaluated when the run goes on from its checkpoint."""
    whole, cut = Evaluation(), Evaluation(at={n: action})
    run(tmp_path / "whole", learner, weights, evaluation=whole)
    with saving_nothing_when_killed(), pytest.raises(Killed if action is killed else KeyboardInterrupt):
        run(tmp_path / "cut", learner, weights, evaluation=cut)
    assert_same(run(tmp_path / "cut", learner, weights, evaluation=cut), uninterrupted)
    assert cut.done == whole.done
    # A second run of the same step follows a kill; an interrupt takes effect when the evaluation has ended.
    expected = [3, 4, 6]
    if action is killed:
        expected.insert(n, expected[n - 1])
    assert cut.began == expected
