"""Versions of weights: patches in order, damage that is healed from a version in full, refusals."""

import json
import resource
import threading
import weakref
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.checkpoint import weight_shards
from composer_jax.checkpoint.weight_chain import Shard, WeightPublisher, WeightReceiver
from composer_jax.checkpoint.weight_shards import BackgroundPublisher, as_tree, local_shards, published_shards
from composer_jax.errors import UserError
from composer_jax.parallel.mesh import make_mesh

BFLOAT16 = np.dtype(jnp.bfloat16)


def trained(versions: int, seed: int = 0) -> list[dict[Shard, np.ndarray]]:
    """Some arrays, and what some steps change of them."""
    rng = np.random.default_rng(seed)
    named = {
        "scale": np.array(rng.standard_normal(), np.float32),
        "table": rng.standard_normal((40, 12)).astype(BFLOAT16),
        "experts": rng.standard_normal((3, 8, 4)).astype(BFLOAT16),
    }
    out = []
    for _ in range(versions):
        named = {name: array.copy() for name, array in named.items()}
        named["scale"][...] += 1
        for name in ("table", "experts"):
            flat = named[name].reshape(-1)
            flat[rng.choice(flat.size, 5, replace=False)] += 0.25
        # The experts are two shards, cut along the last axis, so that neither is contiguous in the whole array.
        shards = {
            Shard(name, (0,) * array.ndim, array.shape): array for name, array in named.items() if name != "experts"
        }
        for start in (0, 2):
            part = np.ascontiguousarray(named["experts"][:, :, start : start + 2])
            shards[Shard("experts", (0, 0, start), (3, 8, 4))] = part
        out.append(shards)
    return out


def whole(shards) -> dict[str, np.ndarray]:
    arrays = {shard.name: np.zeros(shard.whole_shape, array.dtype) for shard, array in shards.items()}
    for shard, array in shards.items():
        place = tuple(slice(i, i + n) for i, n in zip(shard.start, array.shape, strict=True))
        arrays[shard.name][place] = array
    return arrays


def assert_equal(receiver, shards) -> None:
    expected = whole(shards)
    assert receiver.arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert receiver.arrays[name].tobytes() == array.tobytes(), name


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "weights")


def test_a_receiver_follows_patch_by_patch(folder):
    steps, publisher, receiver = trained(8), WeightPublisher(folder, anchor_every=3), WeightReceiver(folder)
    for version, shards in enumerate(steps, 5):
        published = publisher.publish(shards, version)
        assert (published.full_bytes > 0) == (version in (5, 8, 11)) and (published.patch_bytes > 0) == (version > 5)
        if version > 5:
            assert published.changed == 1 + 5 + 5 and published.elements == 1 + 480 + 96
        table = receiver.arrays.get("table")
        assert receiver.receive() == receiver.version == version
        assert table is None or receiver.arrays["table"] is table, "changed in place"
        assert_equal(receiver, shards)
    for back in (11, 9):
        assert receiver.receive(back) == back
        assert_equal(receiver, steps[back - 5])


def test_a_newcomer_begins_with_a_version_in_full_and_old_ones_are_deleted(folder):
    steps, publisher = trained(8), WeightPublisher(folder, anchor_every=3)
    for version, shards in enumerate(steps):
        publisher.publish(shards, version)
    receiver = WeightReceiver(folder)
    assert receiver.receive() == 7
    assert_equal(receiver, steps[7])
    assert sorted(path.name for path in Path(folder).iterdir()) == [f"version-{v:08d}" for v in range(3, 8)]
    with pytest.raises(UserError, match="has versions 3 to 7 of the weights, not 1"):
        receiver.receive(1)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["corrupted", "cut", "missing"])
def test_a_bad_patch_is_undone_and_healed_from_a_version_in_full(folder, how):
    steps, publisher, receiver = trained(4), WeightPublisher(folder, anchor_every=3), WeightReceiver(folder)
    publisher.publish(steps[0], 0)
    publisher.publish(steps[1], 1)
    receiver.receive()
    publisher.publish(steps[2], 2)
    path = Path(folder) / "version-00000002" / "shards-00000.patch"
    if how == "corrupted":
        damage(path)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        path.unlink()
    with pytest.raises(UserError, match=r"version 2 of the weights in .* cannot be built"):
        receiver.receive()
    assert receiver.version == 1, "the version that it had stays"
    assert_equal(receiver, steps[1])
    publisher.publish(steps[3], 3)  # in full
    assert receiver.receive() == 3
    assert_equal(receiver, steps[3])


def test_a_receiver_holds_only_its_parts_however_the_learner_has_cut_them(folder):
    """Its parts cross the borders of the shards that were published."""
    parts = {Shard("experts", (1, 0, 1), (3, 8, 4)): (2, 8, 2), Shard("table", (30, 0), (40, 12)): (10, 12)}
    steps, publisher, receiver = trained(4), WeightPublisher(folder), WeightReceiver(folder, parts)
    for version, shards in enumerate(steps):
        publisher.publish(shards, version)
        assert receiver.receive() == version
        experts, table = receiver.parts.values()
        assert experts.tobytes() == whole(shards)["experts"][1:, :, 1:3].tobytes() and experts.shape == (2, 8, 2)
        assert table.tobytes() == whole(shards)["table"][30:].tobytes() and len(receiver.parts) == 2
    with pytest.raises(UserError, match=r"another network: table has the shape \(40, 12\), not \(41, 12\)"):
        WeightReceiver(folder, {Shard("table", (30, 0), (41, 12)): (10, 12)}).receive()


def test_a_full_folder_is_a_sentence_and_a_version_is_there_as_a_whole_or_not_at_all(folder):
    steps, publisher, receiver = trained(2), WeightPublisher(folder), WeightReceiver(folder)
    publisher.publish(steps[0], 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))  # the patch fits, its list of shards does not
    try:
        with pytest.raises(UserError, match="version 1 of the weights was not published, and those before it stay"):
            publisher.publish(steps[1], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(Path(folder, "version-00000001").iterdir()) and receiver.receive() == 0
    publisher.publish(steps[1], 1)
    assert receiver.receive() == 1
    assert_equal(receiver, steps[1])


def test_versions_rise(folder):
    steps, publisher = trained(1), WeightPublisher(folder)
    publisher.publish(steps[0], 3)
    with pytest.raises(UserError, match="version 3 cannot follow version 3"):
        publisher.publish(steps[0], 3)


def test_an_anchor_that_is_damaged_gives_way_to_the_one_before(folder):
    steps, publisher = trained(5), WeightPublisher(folder, anchor_every=2)
    for version, shards in enumerate(steps):
        publisher.publish(shards, version)
    damage(Path(folder) / "version-00000004" / "shards-00000.full")
    receiver = WeightReceiver(folder)
    assert receiver.receive() == 4
    assert_equal(receiver, steps[4])


def test_a_version_without_a_manifest_does_not_exist(folder):
    steps, publisher = trained(2), WeightPublisher(folder)
    for version, shards in enumerate(steps):
        publisher.publish(shards, version)
    (Path(folder) / "version-00000001" / "manifest.json").unlink()
    assert WeightReceiver(folder).receive() == 0
    # The same run, killed and started again, writes the version once more, in full: nobody knows what it held.
    WeightPublisher(folder).publish(steps[1], 1)
    receiver = WeightReceiver(folder)
    assert receiver.receive() == 1
    assert json.loads((Path(folder) / "version-00000001" / "manifest.json").read_text())["base"] is None


def test_versions_in_any_file_system():
    folder, steps = "memory://weights/run", trained(3)
    publisher, receiver = WeightPublisher(folder), WeightReceiver(folder)
    for version, shards in enumerate(steps):
        publisher.publish(shards, version)
        assert receiver.receive() == version
        assert_equal(receiver, shards)
    fsspec.filesystem("memory").rm("/weights", recursive=True)


def test_each_process_writes_its_shards(folder):
    """Two processes, one after the other: the barriers are not needed then."""
    steps, receiver = trained(3), WeightReceiver(folder)
    publishers = {process: WeightPublisher(folder, process=process, processes=2) for process in (1, 0)}
    for version, shards in enumerate(steps):
        items = list(shards.items())
        for process, publisher in publishers.items():
            publisher.publish(dict(items[process::2]), version)
        assert receiver.receive() == version
        assert_equal(receiver, shards)


def test_weights_of_a_mesh(folder):
    mesh = make_mesh(jax.devices(), data=4, expert=2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "expert"))
    host = {"a": {"w": np.arange(32, dtype=np.float32).reshape(4, 8)}, "b": np.float32(3)}
    weights = {"a": {"w": jax.device_put(host["a"]["w"], sharding)}, "b": jnp.float32(3)}
    WeightPublisher(folder).publish(local_shards(weights), 0)
    receiver = WeightReceiver(folder)
    receiver.receive()
    assert {path.name for path in local_shards(weights)} == {"a/w", "b"} and len(local_shards(weights)) == 3
    jax.tree.map(np.testing.assert_array_equal, as_tree(receiver.arrays, weights), host)
    as_tree(receiver.arrays, {"b": np.zeros(())})
    for tree, words in (({"c": 0}, "c is missing"), ({"a": {"w": np.zeros((4, 9))}, "b": 0}, r"a/w .*\(4, 8\)")):
        with pytest.raises(UserError, match=f"another network: {words}"):
            as_tree(receiver.arrays, jax.tree.map(np.asarray, tree))


def test_weights_are_published_in_bfloat16_and_the_router_bias_as_it_is():
    exact = jnp.float32(1 + 2**-20)
    shards = {shard.name: array for shard, array in published_shards({"w": exact}, {"bias": exact}).items()}
    assert {name: (array.dtype.name, float(array)) for name, array in shards.items()} == {
        "params/w": ("bfloat16", 1.0),
        "router_bias/bias": ("float32", float(exact)),
    }


def test_one_rounded_array_exists_at_a_time(monkeypatch):
    """JAX keeps the host's copy of an array as long as the array, so bfloat16 weights, which live on, are copied."""
    weights = {"a": jnp.ones((3, 5)), "b": jnp.ones((3, 5)), "c": jnp.ones((3, 5), jnp.bfloat16)}
    rounded, local_shards_of = [], weight_shards._local_shards_of

    def note(name, array):
        assert array is not weights["c"] and all(other() is None for other in rounded)
        rounded.append(weakref.ref(array))
        return local_shards_of(name, array)

    monkeypatch.setattr(weight_shards, "_local_shards_of", note)
    assert len(published_shards(weights, {})) == len(rounded) == 3


def test_versions_are_written_in_order_while_the_weights_are_donated(folder):
    may_write, receiver = threading.Event(), WeightReceiver(folder)
    add_one = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    weights = {"w": jnp.zeros(3, jnp.bfloat16)}
    with BackgroundPublisher(WeightPublisher(folder, barrier=lambda: may_write.wait(60))) as publisher:
        publisher.publish(weights, {}, 0)
        weights = jax.block_until_ready(add_one(weights))
        with pytest.raises(UserError, match="no version"):
            receiver.receive()
        may_write.set()
        publisher.publish(weights, {}, 1)
        jax.block_until_ready(add_one(weights))
    for version in (0, 1):
        assert receiver.receive(version) == version
        assert receiver.arrays["params/w"].tolist() == [version] * 3


def test_a_version_that_cannot_be_written_is_an_error_of_the_next_one_or_of_the_end(folder):
    publisher = BackgroundPublisher(WeightPublisher(folder))
    publisher.publish({"w": jnp.zeros(3)}, {}, 1)
    publisher.publish({"w": jnp.zeros(3)}, {}, 1)
    with pytest.raises(UserError, match="version 1 cannot follow version 1"):
        publisher.publish({"w": jnp.zeros(3)}, {}, 2)
    with pytest.raises(UserError, match="version 0 cannot follow version 1"), publisher:
        publisher.publish({"w": jnp.zeros(3)}, {}, 0)


def test_folders_and_intervals_that_mean_nothing(tmp_path):
    for call, words in (
        (lambda: WeightPublisher(str(tmp_path), anchor_every=0), "anchor_every=0"),
        (lambda: WeightReceiver(str(tmp_path)).receive(), "no version"),
        (lambda: WeightReceiver("nosuch://x"), "readable URL"),
    ):
        with pytest.raises(UserError, match=words):
            call()
