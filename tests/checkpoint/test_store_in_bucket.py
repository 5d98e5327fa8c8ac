"""Checkpoints that Orbax writes straight to a bucket."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.storage.bucket import BucketFolder

ARRAYS = {"params": {"w": jnp.arange(5.0), "u": jnp.ones((3, 4), jnp.bfloat16)}, "empty": {}}


def test_steps_are_saved_restored_and_deleted(bucket_url):
    before = []
    with CheckpointStore(f"{bucket_url}/sft", keep=1, before_save=lambda: before.append(store.steps())) as store:
        for step in (1, 2):
            store.save(step, arrays=ARRAYS, json={"step": step})
    assert before == [[], [1]], "it is called before a step is written"
    with CheckpointStore(f"{bucket_url}/sft") as store:
        assert store.steps() == [2]
        arrays, json = store.restore(like=ARRAYS)
    assert json == {"step": 2}
    np.testing.assert_array_equal(arrays["params"]["w"], np.arange(5.0))
    assert arrays["params"]["u"].dtype == jnp.bfloat16
    assert {name.split("/")[0] for name in BucketFolder(f"{bucket_url}/sft").list()} == {"2"}


def test_steps_that_another_machine_writes_are_seen(bucket_url):
    with CheckpointStore(f"{bucket_url}/sft") as store:
        store.save(1, arrays=ARRAYS)
    folder = BucketFolder(f"{bucket_url}/sft")
    with CheckpointStore(f"{bucket_url}/sft") as store:
        assert store.steps() == [1]
        for name in folder.list("1/"):
            folder.write(name.replace("1/", "2/", 1), folder.read(name)[0], 0)
        assert store.steps() == [1, 2]
        store.restore(2, like=ARRAYS)


def test_a_step_without_its_end_does_not_exist(bucket_url):
    with CheckpointStore(f"{bucket_url}/sft") as store:
        store.save(1, arrays=ARRAYS)
        store.save(2, arrays=ARRAYS)
    folder = BucketFolder(f"{bucket_url}/sft")
    folder.delete("2/commit_success.txt", folder.read("2/commit_success.txt")[1])  # the last object of a save
    with CheckpointStore(f"{bucket_url}/sft") as store:
        assert store.steps() == [1]
        store.save(2, arrays=ARRAYS, json={"again": True})
        assert store.restore(like=ARRAYS)[1] == {"again": True}


@pytest.fixture
def threads_that_write(bucket_url):
    """Returns the threads of a save; the process does not end before they do. Those of pools end with it."""
    pools, before = ("ThreadPoolExecutor", "asyncio", "metadata_store"), threading.enumerate()

    def threads() -> list[threading.Thread]:
        new = [thread for thread in threading.enumerate() if thread not in before]
        return [thread for thread in new if not (thread.daemon or thread.name.startswith(pools))]

    return threads


def test_a_bucket_that_does_not_exist_is_a_sentence(threads_that_write):
    store = CheckpointStore("gs://no-such-bucket/sft")
    with pytest.raises(UserError, match="the bucket gs://no-such-bucket does not exist; create it or name another"):
        store.save(1, arrays=ARRAYS)
    assert not threads_that_write()


# TensorStore answers writes that Orbax, whose event loop is closed by then, does not wait for after the first error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_bucket_that_goes_away_during_a_save_is_a_sentence(threads_that_write, monkeypatch):
    monkeypatch.setattr(BucketFolder, "names", lambda self: [])  # it was there when the save began
    with CheckpointStore("gs://no-such-bucket/sft") as store:
        store.save(1, arrays=ARRAYS)
        with pytest.raises(UserError, match="no-such-bucket/sft: .*the steps saved before are intact; run the same"):
            store.wait()
    deadline = time.monotonic() + 60
    while threads_that_write():
        assert time.monotonic() < deadline, threads_that_write()
        time.sleep(0.01)
