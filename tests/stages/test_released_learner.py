"""A learner goes back to the state of a released version: weights and optimizer, bit for bit."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.observe.journal import Journal
from composer_jax.rl.learning_step import Cursor
from composer_jax.stages.released_learner import LearnerCheckpoints
from composer_jax.storage.workdir import lock_folder
from composer_jax.train.learner import TrainState
from composer_jax.train.loop import restore_state, save_state


def state(seed: int) -> TrainState:
    """Weights in bfloat16, a router bias and an optimizer state with an empty part."""
    rng = np.random.default_rng(seed)
    params = {"layers": [{"w": jnp.asarray(rng.standard_normal((4, 6)), jnp.bfloat16)}, {"w": jnp.ones(3) * seed}]}
    moments = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32), params)
    return TrainState(params, {"bias": jnp.full(4, seed, jnp.float32)}, (moments, {}), jnp.int32(seed))


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture
def run(tmp_path):
    """A run that saves every step and keeps two; version = step + 4."""
    path = tmp_path / "run"
    checkpoints = path / "checkpoints" / "rl"
    checkpoints.mkdir(parents=True)
    return path


def train(run, steps) -> None:
    journal = Journal(run / "batches.jsonl")
    with CheckpointStore(run / "checkpoints" / "rl", keep=2, notes={"model": {"d_model": 4}}) as store:
        for step in steps:
            journal.append({"step": step})
            save_state(store, state(step), step, cursor=Cursor(step, step + 4, step).to_json())
            store.wait()
    journal.close()


def test_weights_and_optimizer_go_back_bit_for_bit(run):
    learner = LearnerCheckpoints(str(run / "checkpoints" / "rl"))
    train(run, [1, 2])
    learner.keep([6])
    train(run, [3, 4, 5])
    learner.keep([6, 9])
    learner.restore(6, 10)
    learner.restore(6, 10)
    with CheckpointStore(run / "checkpoints" / "rl") as store:
        assert store.steps() == [5], "the steps of versions that nobody serves are gone"
        assert store.read_notes() == {"model": {"d_model": 4}}
        restored, saved = restore_state(store, state(0))
    assert bits(restored) == bits(state(2))
    assert Cursor(**saved["cursor"]) == Cursor(task_step=5, weight_version=10, optimizer_step=2)


def test_a_state_that_was_learned_is_not_taken_for_the_restored_one(run):
    """The learner had saved version 9, which it had not published when version 6 was restored as 9."""
    learner = LearnerCheckpoints(str(run / "checkpoints" / "rl"))
    train(run, [1, 2])
    learner.keep([6])
    train(run, [3, 4, 5])
    learner.restore(6, 9)
    learner.keep([9])
    learner.restore(9, 9 + 1)  # the restored version is itself gone back to
    with CheckpointStore(run / "checkpoints" / "rl") as store:
        restored, saved = restore_state(store, state(0))
    assert bits(restored) == bits(state(2))
    assert saved["cursor"]["weight_version"] == 10 and saved["restores"] == 9


def test_the_latest_step_of_a_version_is_kept(run):
    """A step without an update makes no version."""
    learner = LearnerCheckpoints(str(run / "checkpoints" / "rl"))
    with CheckpointStore(run / "checkpoints" / "rl", keep=2) as store:
        for step in (1, 2):
            save_state(store, state(step), step, cursor=Cursor(step, 5, 1).to_json())
            store.wait()
    learner.keep([5])
    assert learner.has(5) and not learner.has(4)
    with CheckpointStore(run / "checkpoints" / "rl-released") as kept:
        assert kept.read_json(5)["cursor"]["task_step"] == 2


def test_a_restoration_that_was_killed_in_between_is_done_again(run):
    learner = LearnerCheckpoints(str(run / "checkpoints" / "rl"))
    train(run, [1])
    learner.keep([5])
    train(run, [2, 3])
    for left in (run / "checkpoints" / "rl").iterdir():
        for file in sorted(left.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        left.rmdir()
    learner.restore(5, 8)
    with CheckpointStore(run / "checkpoints" / "rl") as store:
        assert store.steps() == [3] and store.read_json()["cursor"]["weight_version"] == 8


def test_a_kill_within_a_restoration_does_not_lose_the_task_step(run, monkeypatch):
    """Updates from traffic leave no line in batches.jsonl: the steps that are deleted are all that tells it."""
    learner = LearnerCheckpoints(str(run / "checkpoints" / "rl"))
    with CheckpointStore(run / "checkpoints" / "rl", keep=2) as store:
        save_state(store, state(0), 0, cursor=Cursor(0, 0, 0).to_json())
        store.wait()
        learner.keep([0])
        save_state(store, state(3), 3, cursor=Cursor(3, 1, 3).to_json())

    rmtree = shutil.rmtree

    def remove_and_die(path, *args, **options):
        rmtree(path, *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(shutil, "rmtree", remove_and_die)
        learner.restore(0, 2)
    learner.restore(0, 2)
    with CheckpointStore(run / "checkpoints" / "rl") as store:
        restored, saved = restore_state(store, state(1))
        assert store.latest_step() == 3
    assert Cursor(**saved["cursor"]) == Cursor(task_step=3, weight_version=2, optimizer_step=0)
    assert bits(restored) == bits(state(0))


def test_what_no_release_needs_is_dropped(run):
    learner = LearnerCheckpoints(str(run / "checkpoints" / "rl"))
    train(run, [1, 2])
    learner.keep([5, 6])
    learner.keep([6])
    assert [folder.name for folder in (run / "checkpoints" / "rl-released").iterdir()] == ["6"]
    with pytest.raises(UserError, match="has no state of version 5"):
        learner.restore(5, 9)


def test_a_learner_that_runs_is_not_replaced(run):
    learner = LearnerCheckpoints(str(run / "checkpoints" / "rl"))
    train(run, [1])
    learner.keep([5])
    lock = lock_folder(run, "1 other")
    with pytest.raises(UserError, match="is in use by process 1"):
        learner.restore(5, 9)
    os.close(lock)


def test_the_process_that_has_the_run_open_may_replace_its_learner(run):
    train(run, [1])
    lock = lock_folder(run, "1 other")
    learner = LearnerCheckpoints(str(run / "checkpoints" / "rl"), holder="1 other")
    learner.keep([5])
    learner.restore(5, 9)
    os.close(lock)
    with CheckpointStore(run / "checkpoints" / "rl") as store:
        assert store.read_json()["cursor"]["weight_version"] == 9
    lock = lock_folder(run, "2 another")
    with pytest.raises(UserError, match="is not the folder that process 0 works in"):
        learner.restore(5, 10)
    os.close(lock)


def test_a_folder_without_checkpoints(tmp_path):
    with pytest.raises(UserError, match="is not a folder of checkpoints"):
        LearnerCheckpoints(str(tmp_path / "nothing"))
