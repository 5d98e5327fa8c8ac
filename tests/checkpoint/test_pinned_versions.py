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


def halves(version: int) -> dict[Shard, np.ndarray]:
    """The same weights as `weights`, with the table cut between other rows."""
    whole = np.concatenate([array for shard, array in weights(version).items() if shard.name == "table"], axis=1)
    rows = {Shard("table", (at, 0), (6, 8)): whole[at : at + 3].copy() for at in (0, 3)}
    return rows | {Shard("scale", (), ()): np.array(version, np.float32)}


def test_a_trainer_that_runs_does_not_replace_a_restored_version(folder):
    trainer = published(folder, range(6))
    restore_version(folder, 2, 6)
    pin_versions(folder, [6])
    for version in (6, 7):
        with pytest.raises(UserError, match="somebody else has published version 6"):
            trainer.publish(weights(version), version)
    assert received(folder, 6) == received(folder, 2)


def test_a_pinned_version_has_its_weights_however_they_are_cut(folder):
    published(folder, range(4))
    pin_versions(folder, [3])
    with pytest.raises(UserError, match="pinned and has other weights"):
        WeightPublisher(folder).publish(halves(4) | {Shard("scale", (), ()): np.array(3, np.float32)}, 3)
    again = WeightPublisher(folder)
    again.publish(halves(3), 3)
    again.publish(halves(4), 4)
    assert received(folder, 4)["scale"] == np.array(4, np.float32).tobytes()


def test_a_pinned_version_stays_as_it_is_while_a_learner_starts_again(folder):
    """A server that reads between two processes of the learner gets the weights, and no zeros."""
    published(folder, range(4))
    pin_versions(folder, [3])
    expected, reads = received(folder, 3), []
    shards = list(halves(3).items())
    for process in (0, 1):
        publisher = WeightPublisher(
            folder, process=process, processes=2, barrier=lambda: reads.append(received(folder, 3))
        )
        publisher.publish(dict(shards[process::2]), 3)
    assert len(reads) >= 4 and all(read == expected for read in reads)
    with pytest.raises(UserError, match="pinned and has other weights"):
        WeightPublisher(folder, process=1, processes=2).publish({shards[1][0]: shards[1][1] + 1}, 3)


def test_a_version_of_which_a_part_is_missing_is_not_loaded(folder):
    WeightPublisher(folder).publish(dict(list(weights(1).items())[1:]), 1)
    with pytest.raises(UserError, match="version 1 has only a part of table"):
        WeightReceiver(folder).receive()


def test_a_restored_version_is_found_whatever_came_after_it(folder):
    published(folder, range(4))
    pin_versions(folder, [1])
    restore_version(folder, 1, 4)
    WeightPublisher(folder).publish(weights(9), 9)
    restore_version(folder, 1, 4)
    assert received(folder, 4) == received(folder, 1)


def test_a_chain_has_one_owner(folder):
    published(folder, range(3))
    pin_versions(folder, [1], "runs/a")
    for owner in ("runs/b", ""):
        with pytest.raises(UserError, match="are released from runs/a"):
            pin_versions(folder, [2], owner)
    pin_versions(folder, [2], "runs/a")
    assert ChainFiles(folder).read_pins() == ({2}, "runs/a")
