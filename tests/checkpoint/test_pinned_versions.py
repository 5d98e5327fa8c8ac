"""Pinned versions of a chain stay in full, and the way back to one is a new version with its bits."""

from pathlib import Path

import numpy as np
import pytest

from composer_jax.checkpoint.pinned_versions import pin_versions, restore_version, weights_hash
from composer_jax.checkpoint.weight_chain import ChainFiles, Shard, WeightPublisher, WeightReceiver
from composer_jax.errors import UserError


def weights(version: int) -> dict[Shard, np.ndarray]:
    """A table in two shards and a scalar, which differ a little from version to version."""
    table = np.arange(48, dtype=np.float32).reshape(6, 8).astype(np.dtype("bfloat16"))
    table[version % 6] += version + 1
    halves = {Shard("table", (0, at), (6, 8)): np.ascontiguousarray(table[:, at : at + 4]) for at in (0, 4)}
    return halves | {Shard("scale", (), ()): np.array(version, np.float32)}


def published(folder: str, versions: range, **options) -> WeightPublisher:
    publisher = WeightPublisher(folder, **options)
    for version in versions:
        publisher.publish(weights(version), version)
    return publisher


def received(folder: str, version: int | None = None) -> dict[str, bytes]:
    receiver = WeightReceiver(folder)
    receiver.receive(version)
    return {name: array.tobytes() for name, array in receiver.arrays.items()}


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "weights")


def test_a_pinned_version_outlives_the_anchors_around_it(folder):
    publisher = published(folder, range(5), anchor_every=3)
    expected = received(folder, 4)
    pin_versions(folder, [4])
    for version in range(5, 30):
        publisher.publish(weights(version), version)
    there = sorted(ChainFiles(folder).manifests())
    assert there[0] == 4 and len(there) < 10
    assert received(folder, 4) == expected
    assert received(folder) == received(folder, 29)


def test_a_version_that_is_no_longer_pinned_is_deleted(folder):
    publisher = published(folder, range(3), anchor_every=2)
    pin_versions(folder, [1])
    pin_versions(folder, [])
    for version in range(3, 12):
        publisher.publish(weights(version), version)
    assert min(ChainFiles(folder).manifests()) > 1


def test_servers_get_the_bits_of_the_restored_version_in_one_pull(folder):
    published(folder, range(6), anchor_every=10)
    follower, latecomer = WeightReceiver(folder), WeightReceiver(folder)
    follower.receive()
    restore_version(folder, 2, 6, {"release": 7})
    for receiver in (follower, latecomer):
        assert receiver.receive() == 6
        assert {name: array.tobytes() for name, array in receiver.arrays.items()} == received(folder, 2)
    assert weights_hash(folder, 6) == weights_hash(folder, 2)
    manifest = ChainFiles(folder).manifests()[6]
    assert manifest["restores"] == 2 and manifest["release"] == 7
    restore_version(folder, 2, 6)  # a second call after a crash
    with pytest.raises(UserError, match="version 6 cannot restore version 3: .* up to 6; use 7"):
        restore_version(folder, 3, 6)


def test_equal_weights_have_equal_hashes(folder, tmp_path):
    published(folder, range(3))
    other = str(tmp_path / "other")
    WeightPublisher(other).publish(weights(2), 9)
    assert weights_hash(folder, 2) == weights_hash(other, 9) != weights_hash(folder, 1)
    with pytest.raises(UserError, match="has versions 0, 1, 2 of the weights, not 5"):
        weights_hash(folder, 5)


def test_a_learner_that_starts_again_does_not_replace_what_a_release_has_pinned(folder):
    published(folder, range(4))
    pin_versions(folder, [3])
    with pytest.raises(UserError, match="version 2 would replace version 3 .* go on from weights of version 3"):
        WeightPublisher(folder).publish(weights(2), 2)
    with pytest.raises(UserError, match="pinned and has other weights"):
        WeightPublisher(folder).publish(weights(8), 3)
    assert received(folder, 3)
    restore_version(folder, 3, 4)
    pin_versions(folder, [4])
    again = WeightPublisher(folder)
    again.publish(weights(3), 4)
    assert ChainFiles(folder).manifests()[4]["restores"] == 3
    again.publish(weights(5), 5)
    assert received(folder, 5) == {s: received(folder)[s] for s in received(folder)}


def test_a_chain_without_the_version_cannot_pin_it(folder):
    published(folder, range(2))
    with pytest.raises(UserError, match="has versions 0, 1 of the weights, not 7"):
        pin_versions(folder, [7])


def test_damaged_pins_are_an_error_and_not_no_pins(folder):
    publisher = published(folder, range(2))
    (Path(folder) / "pins.json").write_text("{")
    with pytest.raises(UserError, match=r"pins.json is damaged"):
        publisher.publish(weights(2), 2)
