"""Checkpoints that Orbax writes straight to a bucket."""

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


def test_a_bucket_that_is_gone_is_a_sentence(bucket_url):
    with (
        CheckpointStore("gs://no-such-bucket/sft") as store,
        pytest.raises(UserError, match="gs://no-such-bucket/sft: .*the steps saved before are intact; run the same"),
    ):
        store.save(1, arrays=ARRAYS)
        store.wait()
