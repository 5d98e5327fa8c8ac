"""The checkpoint store: bit-exact, whole or absent, onto any mesh, and clear about what does not fit."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.checkpoint import store as store_module
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError

ROOT = Path(__file__).parents[2]


def make_params(scale: float = 1.0) -> dict:
    """Dicts, a list and a tuple; several dtypes; a scalar; a value that only survives if no bit is lost."""
    rng = np.random.default_rng(0)
    return {
        "embed": jnp.asarray(rng.standard_normal((16, 8)) * scale, jnp.float32),
        "layers": [
            {"w": jnp.asarray(rng.standard_normal((8, 8)), jnp.bfloat16), "norm": jnp.full((8,), jnp.nan)},
            {"w": jnp.asarray(rng.standard_normal((8, 8)), jnp.bfloat16), "norm": jnp.full((8,), -0.0)},
        ],
        "pair": (jnp.arange(3, dtype=jnp.int8), jnp.float32(1) / 3),
    }


def assert_same_bits(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def mesh_of(shape: tuple[int, int]) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)


def test_everything_comes_back_bit_for_bit(tmp_path):
    params = make_params()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
    arrays = {"params": params, "optimizer": optimizer, "none": {}}
    arrays["rng"] = np.array([7, 2**32 - 1], np.uint32)
    values = {"tokens": 123, "data": {"cursor": [1, 2], "name": "é"}, "loss": 0.1}
    with CheckpointStore(tmp_path / "ckpt") as store:
        store.save(5, arrays=arrays, json=values)
    with CheckpointStore(tmp_path / "ckpt") as store:
        got, got_values = store.restore(like=arrays)
    assert got_values == values
    assert_same_bits(got, arrays)
    assert isinstance(got["rng"], np.ndarray)


def test_named_tuples_and_abstract_leaves(tmp_path):
    class Router(NamedTuple):
        bias: jax.Array
        counts: jax.Array

    router = Router(jnp.arange(4.0), jnp.arange(4))
    like = jax.eval_shape(lambda: router)
    with CheckpointStore(tmp_path) as store:
        store.save(0, arrays={"router": router, "bare": jnp.arange(5)})
        assert_same_bits(store.restore(like={"router": like})[0]["router"], router)
        assert_same_bits(store.restore(like={"bare": jax.ShapeDtypeStruct((5,), jnp.int32)})[0]["bare"], jnp.arange(5))


def test_one_item_alone_without_the_others(tmp_path):
    params = make_params()
    with CheckpointStore(tmp_path) as store:
        store.save(1, arrays={"params": params, "optimizer": optax.adam(1e-3).init(params)})
        store.save(2, arrays={"params": make_params(scale=2.0)})
        assert_same_bits(store.restore(1, like={"params": params})[0]["params"], params)
        assert_same_bits(store.restore(like={"params": params})[0]["params"], make_params(scale=2.0))


@pytest.mark.parametrize(("saved_on", "restored_on"), [((8, 1), (1, 8)), ((2, 4), (4, 2))])
def test_restores_onto_another_mesh(tmp_path, saved_on, restored_on):
    value = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
    source = jax.device_put(value, NamedSharding(mesh_of(saved_on), P("data", "expert")))
    target = NamedSharding(mesh_of(restored_on), P("expert", "data"))
    with CheckpointStore(tmp_path) as store:
        store.save(0, arrays={"params": {"w": source}})
        like = {"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=target)}
        got = store.restore(like={"params": like})[0]["params"]["w"]
        assert got.sharding == target
        np.testing.assert_array_equal(got, value)
        # From a mesh to no mesh: uncommitted, so that it can be mixed with arrays placed anywhere.
        like = {"w": jax.ShapeDtypeStruct(value.shape, value.dtype)}
        alone = store.restore(like={"params": like})[0]["params"]["w"]
        assert not alone.committed
        np.testing.assert_array_equal(alone + got, 2 * value)


def test_a_sharding_that_does_not_divide_is_no_damage(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(0, arrays={"w": jnp.ones((6, 8))})
        sharding = NamedSharding(mesh_of((8, 1)), P("data"))
        with pytest.raises(UserError, match=r"value float32\[6,8\] cannot be sharded so: .*8"):
            store.restore(like={"w": jax.ShapeDtypeStruct((6, 8), jnp.float32, sharding=sharding)})


def test_keeps_the_latest_and_names_steps_in_order(tmp_path):
    store = CheckpointStore(tmp_path / "new", keep=2)
    assert store.steps() == [] and store.latest_step() is None
    assert not (tmp_path / "new").exists()
    for step in (1, 5, 10, 200):
        store.save(step, arrays={"w": jnp.full((2,), step)}, json={"at": step})
    store.wait()
    reader = CheckpointStore(tmp_path / "new")
    assert reader.steps() == [10, 200] and reader.latest_step() == 200
    store.save(300, arrays={"w": jnp.full((2,), 300)}, json={"at": 300})
    store.wait()
    assert reader.steps() == [200, 300]  # a reader sees what another process wrote since
    got, values = reader.restore(200, like={"w": jnp.zeros((2,), jnp.int32)})
    assert values == {"at": 200} and got["w"].tolist() == [200, 200]
    store.close()
    reader.close()


def test_a_step_is_written_while_its_arrays_change(tmp_path, monkeypatch):
    """What is written is the state at the call, though the devices' buffers are donated before a byte is written."""
    add_one = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = {
        "w": jnp.zeros((64, 64)),
        "sharded": jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh_of((8, 1)), P("data"))),
    }
    host = np.zeros(5)
    may_write, open_array = threading.Event(), tensorstore.open

    async def open_later(*args, **options):
        assert await asyncio.to_thread(may_write.wait, 60)
        return await open_array(*args, **options)

    monkeypatch.setattr(tensorstore, "open", open_later)
    with CheckpointStore(tmp_path) as store:
        store.save(1, arrays={"tree": tree, "host": {"x": host}})
        host += 1
        for _ in range(3):
            tree = jax.block_until_ready(add_one(tree))
        assert CheckpointStore(tmp_path).steps() == []
        may_write.set()
        assert store.steps() == [1]
        restored, _ = store.restore(like={"tree": tree, "host": {"x": host}})
        for leaf in jax.tree.leaves(restored):
            assert (np.asarray(leaf) == 0).all()


def test_arrays_in_pinned_host_memory_are_written_from_copies(tmp_path, monkeypatch):
    """A GPU refuses to donate a buffer that is being written; the transfer to the host copies other arrays."""
    pinned = NamedSharding(mesh_of((8, 1)), P("data"), memory_kind="pinned_host")
    arrays = {"moments": jax.device_put(jnp.arange(16.0).reshape(8, 2), pinned), "w": jnp.ones(3)}
    written, save = {}, ocp.CheckpointManager.save

    def spy(manager, step, *, args, **options):
        written.update(args["state"].item)
        return save(manager, step, args=args, **options)

    monkeypatch.setattr(ocp.CheckpointManager, "save", spy)
    with CheckpointStore(tmp_path) as store:
        store.save(1, arrays={"state": arrays})
        assert written["w"] is arrays["w"] and written["moments"].sharding == pinned
        pointers = [
            {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
            for array in (written["moments"], arrays["moments"])
        ]
        assert pointers[0].isdisjoint(pointers[1])
        restored = store.restore(like={"state": arrays})[0]["state"]
    assert_same_bits(restored, arrays)
    assert restored["moments"].sharding == pinned


def test_a_step_that_takes_too_long_is_a_sentence(tmp_path, monkeypatch):
    may_write, open_array = threading.Event(), tensorstore.open

    async def open_later(*args, **options):
        assert await asyncio.to_thread(may_write.wait, 60)
        return await open_array(*args, **options)

    monkeypatch.setattr(tensorstore, "open", open_later)
    monkeypatch.setattr(store_module, "_WRITE_TIMEOUT_S", 1)
    store = CheckpointStore(tmp_path)
    store.save(1, arrays={"w": jnp.ones(3)})
    with pytest.raises(UserError, match="not complete after 1 s; the steps saved before are intact; write to faster"):
        store.wait()
    may_write.set()


def test_a_process_whose_write_fails_does_not_wait_for_the_others(tmp_path, monkeypatch):
    """They wait for its write. A caller that saves because it was interrupted waits at the barriers as usual."""
    waits_for_ever, met = threading.Event(), []

    def barrier(*, key, timeout_ms):
        met.append(threading.current_thread())
        assert met[-1] is threading.main_thread() or waits_for_ever.wait(60)

    async def fail(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.multihost, "get_barrier_sync_fn", lambda **_: barrier)
    monkeypatch.setattr(tensorstore, "open", fail)
    store = CheckpointStore(tmp_path)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        store.save(1, arrays={"w": jnp.ones(3)})
    assert met and set(met) == {threading.main_thread()}
    watchdog = threading.Timer(20, waits_for_ever.set)
    watchdog.start()
    with pytest.raises(UserError, match="No space left on device; the steps saved before are intact"):
        store.wait()
    assert not waits_for_ever.is_set()
    watchdog.cancel()


def test_goes_on_after_reopening(tmp_path):
    for step in range(3):
        with CheckpointStore(tmp_path, keep=2) as store:
            assert store.latest_step() == (step - 1 if step else None)
            store.save(step, arrays={"w": jnp.ones(2) * step})
    assert CheckpointStore(tmp_path).steps() == [1, 2]


def test_what_does_not_fit_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(UserError, match=f"no checkpoint in {tmp_path}"):
        store.restore(like={})
    store.save(3, arrays={"params": make_params()})
    like = make_params()

    def complaint(**kwargs) -> str:
        with pytest.raises(UserError) as error:
            store.restore(**kwargs)
        return str(error.value)

    assert "no step 4" in complaint(step=4, like={"params": like}) and str(tmp_path) in str(store.directory)
    assert "no item 'optimizer'; it has params" in complaint(like={"optimizer": like})
    changed = {**like, "embed": jnp.zeros((16, 9))}
    assert "embed is float32[16,8] there and float32[16,9] here" in complaint(like={"params": changed})
    changed = {**like, "embed": jnp.zeros((16, 8), jnp.bfloat16)}
    assert "embed is float32[16,8] there and bfloat16[16,8] here" in complaint(like={"params": changed})
    changed = {**like, "extra": jnp.zeros(1)}
    assert "extra is missing from the checkpoint" in complaint(like={"params": changed})
    changed = {key: value for key, value in like.items() if key != "embed"}
    assert "embed is in the checkpoint only" in complaint(like={"params": changed})
    assert "and 4 more" in complaint(like={"params": {"other": jnp.zeros(1)}}), "a long list ends in a count"
    with pytest.raises(UserError, match="step 3 is already saved"):
        store.save(3, arrays={"params": like})
    store.close()


def test_what_cannot_be_saved_leaves_nothing_behind(tmp_path):
    store = CheckpointStore(tmp_path)
    for arrays, json, error, words in (
        ({"params": {"lr": 0.1}}, {}, TypeError, r"params\.lr is a float"),
        ({}, {"path": tmp_path}, TypeError, "JSON"),
        ({"params": {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}}, {}, ValueError, "two leaves"),
        ({"meta": {}}, {}, ValueError, "own item"),
    ):
        with pytest.raises(error, match=words):
            store.save(0, arrays=arrays, json=json)
    with pytest.raises(UserError, match="keep=0"):
        CheckpointStore(tmp_path, keep=0)
    assert store.steps() == []


def truncate_files(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("item", ["w", "meta"])
def test_damaged_files_name_the_step_to_fall_back_on(tmp_path, item):
    like = {"w": jnp.ones((64, 64))}
    with CheckpointStore(tmp_path, keep=2) as store:
        for step in (3, 5, 7):
            store.save(step, arrays={"w": jnp.full((64, 64), float(step))})
    truncate_files(tmp_path / "7" / item)
    with pytest.raises(UserError, match=f"step 7 in {tmp_path} cannot be read.*delete {tmp_path}/7 .* step 5"):
        CheckpointStore(tmp_path).restore(like=like)
    shutil.rmtree(tmp_path / "7")
    assert CheckpointStore(tmp_path).restore(like=like)[0]["w"][0, 0] == 5


def test_damaged_files_of_the_only_step_name_no_other(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(7, arrays={"w": jnp.ones((64, 64))})
    truncate_files(tmp_path / "7" / "w")
    with pytest.raises(UserError, match=f"no earlier step is kept.*delete {tmp_path}/7 to start over"):
        CheckpointStore(tmp_path).restore(like={"w": jnp.ones((64, 64))})


WRITER = """
import resource, sys
import jax, jax.numpy as jnp
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
store = CheckpointStore(sys.argv[1], keep=3)
"""


def start(code: str, *args: str) -> subprocess.Popen:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITER + code, *args]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_kill_in_the_middle_of_a_save_never_leaves_half_a_step(tmp_path):
    process = start(
        """
for step in range(1, 10_000):
    arrays = {"a": jnp.full((400, 400), step), "b": [jnp.full((400,), step)] * 8}
    store.save(step, arrays=arrays, json={"at": step})
    print(step, flush=True)
""",
        str(tmp_path),
    )
    for _ in range(5):  # the fifth is being written
        process.stdout.readline()
    # Into the middle of the next save: wait until its draft appears.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not any("tmp" in path.name for path in tmp_path.iterdir()):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    like = {"a": jnp.zeros((400, 400), jnp.int32), "b": [jnp.zeros((400,), jnp.int32)] * 8}
    with CheckpointStore(tmp_path, keep=3) as store:
        steps = store.steps()
        assert steps and steps[-1] >= 4
        for step in steps:
            got, values = store.restore(step, like=like)
            assert values == {"at": step}
            assert all((leaf == step).all() for leaf in jax.tree.leaves(got))
        store.save(steps[-1] + 1, arrays=like)
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name], "the killed draft is gone"


def test_a_full_disk_is_a_sentence_and_the_run_can_go_on_and_end(tmp_path):
    process = start(
        """
key = jax.random.key(0)
store.save(1, arrays={"w": jnp.ones(4)})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
noise = {"w": jax.random.normal(key, (500, 500))}
try:
    store.save(2, arrays=noise)
    store.wait()
except UserError as error:
    print(error)
print(store.steps())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.save(2, arrays=noise)
print(store.steps())
store.directory.rename(store.directory.with_name("moved"))
store.directory.touch()  # no folder can be made here: no thread may wait for one
try:
    store.save(3, arrays=noise)
except UserError as error:
    print(error)
""",
        str(tmp_path / "run"),
    )
    output = process.communicate(timeout=60)[0]
    lines = output.strip().splitlines()
    assert len(lines) == 4, output
    assert lines[0].startswith(f"cannot write a checkpoint to {tmp_path}/run: File too large; ")
    assert lines[1:3] == ["[1]", "[1, 2]"]
    assert lines[3].startswith(f"cannot write a checkpoint to {tmp_path}/run: Not a directory; ")
