"""What processes get of a batch, put together, is the batch; nobody gets more than its devices hold."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest

from composer_jax.agent.transcript import TranscriptRow
from composer_jax.errors import UserError
from composer_jax.frames import FrameError, encode_frame
from composer_jax.models.route_dtypes import NO_ROUTE
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl.batch import WeightedRow, pack_rows
from composer_jax.scale import step_bytes
from composer_jax.scale.step_bytes import frame_overhead, token_bytes
from composer_jax.train import batch_parts, shard_batch
from composer_jax.train.batch_parts import BatchPartReader, part_bytes, part_frames
from tests.test_frames import read

ROUTES = (3, 2)
PROCESSES = 4
MESHES = [
    dict(data=8),
    dict(data=2, context=4),
    dict(data=4, context=2),
    dict(replica=2, context=2, tensor=2),
    dict(data=2, tensor=4),
]


class OneOfFour:
    """A device of one of four processes."""

    def __init__(self, device):
        self.process_index = device.id * PROCESSES // 8


@pytest.fixture(params=MESHES, ids=str)
def mesh(request, monkeypatch):
    whole = jax.sharding.NamedSharding.devices_indices_map
    monkeypatch.setattr(
        jax.sharding.NamedSharding,
        "devices_indices_map",
        lambda self, shape: {OneOfFour(device): index for device, index in whole(self, shape).items()},
    )
    return make_mesh(jax.devices(), **request.param)


def rows(lengths) -> list[WeightedRow]:
    """Rows whose routes are known in parts; the second token has none."""
    made = []
    for number, n in enumerate(lengths):
        routes = (np.arange(n * 6).reshape(n, *ROUTES) + 7 * number) % 384
        parts = [(0, routes[:1].astype(np.uint8)), (1, routes[1:-1].astype(np.uint16))]
        row = TranscriptRow(
            np.arange(n, dtype=np.int32) + 100 * number,
            np.ones(n, bool),
            -np.ones(n, np.float32),
            np.zeros(n, np.int32),
            parts,
        )
        made.append(WeightedRow.of(row, 0.5 * number))
    return made


def packed(length=32, n_rows=8):
    lengths = [5, length, 3, 9, 11, length - 1, 7, 2, 16, 13, 8, length // 2]
    return pack_rows(rows(lengths), ((length, n_rows),), route_shape=ROUTES)


def whole(batch, mesh):
    """The batch as a dict of arrays, positions in the order of the devices."""
    order = zigzag_order(batch["tokens"].shape[1], mesh.shape["context"])
    slots = batch_parts.SLOT_FIELDS
    return {name: np.asarray(f) if name in slots else np.asarray(f)[:, order] for name, f in batch.items()}


def test_routes_are_made_as_if_the_batch_were_whole():
    result = packed()
    for (place, row), name in itertools.product(zip(result.places, result.rows, strict=True), ("routes", "tokens")):
        value = np.asarray(result.batches[place.batch][name])[place.row, place.start : place.stop]
        np.testing.assert_array_equal(value, getattr(row.row, name))
    for batch in result.batches:
        padding = np.asarray(batch["segments"]) == 0
        assert padding.any() and (np.asarray(batch["routes"])[padding] == NO_ROUTE).all()


@pytest.mark.parametrize("piece_bytes", [300, 5000], ids=["positions of a row", "rows"])
def test_processes_get_what_their_devices_hold(mesh, monkeypatch, piece_bytes):
    monkeypatch.setattr(batch_parts, "PIECE_BYTES", piece_bytes)
    (batch,) = packed().batches
    batch["teacher_states"] = np.arange(8 * 4 * 2).reshape(8, 4, 2).astype(ml_dtypes.bfloat16)
    expected, sizes = whole(batch, mesh), []
    for process in range(PROCESSES):
        monkeypatch.setattr(batch_parts, "process_index", lambda process=process: process)
        reader = BatchPartReader(mesh)
        frames = [encode_frame(*frame) for frame in part_frames(batch, mesh, process)]
        for frame in frames:
            reader.add(*read(frame))
        part = reader.take()
        for name, field in part.items():
            for block in shard_batch.process_blocks(mesh, process, name, field.shape):
                np.testing.assert_array_equal(shard_batch.read_block(field, block, mesh, name), expected[name][block])
        pieces = [sum(array.nbytes for array in read(frame)[1]) for frame in frames]
        assert max(pieces) <= piece_bytes, "a row and a position have fewer bytes"
        content = sum(array.nbytes for frame in frames for array in read(frame)[1])
        assert content == part_bytes(batch, mesh, process)
        sizes.append(content)
    # `replica` and `data` divide rows, `context` positions; every other axis repeats both.
    blocks = mesh.shape["replica"] * mesh.shape["data"] * mesh.shape["context"]
    of_process = max(1, blocks // PROCESSES) / blocks
    no_slots = sum(field.nbytes for name, field in expected.items() if name not in batch_parts.SLOT_FIELDS)
    assert no_slots == 8 * 32 * token_bytes(ROUTES, 384)
    assert all(of_process * no_slots <= size <= of_process * no_slots + 2 * 8 * 4 * 2 for size in sizes)


@pytest.mark.parametrize("length", [32, 64])
def test_parts_have_the_bytes_that_the_formula_says(mesh, length):
    (batch, *_) = packed(length).batches
    blocks = mesh.shape["replica"] * mesh.shape["data"] * mesh.shape["context"]
    options = dict(copies=max(1, PROCESSES // blocks))
    sizes = [part_bytes(batch, mesh, process) for process in range(PROCESSES)]
    assert sizes == [step_bytes.part_bytes(8 * length, token_bytes(ROUTES, 384), PROCESSES, **options)] * PROCESSES
    assert sum(sizes[1:]) == step_bytes.sent_bytes(8 * length, token_bytes(ROUTES, 384), PROCESSES, **options)


def test_seconds_of_batches_are_those_of_the_sender_or_of_a_receiver():
    assert step_bytes.batch_seconds(1e6, 992, 1) == 0
    assert step_bytes.batch_seconds(1e6, 992, 2) == pytest.approx(0.5 * 992e6 / step_bytes.RECEIVE_RATE)
    assert step_bytes.batch_seconds(2e6, 992, 256) == pytest.approx(255 / 256 * 2 * 992e6 / step_bytes.SEND_RATE)


@pytest.mark.parametrize("length", [64, 256])
def test_headers_are_as_small_as_the_formula_says(mesh, length, monkeypatch):
    monkeypatch.setattr(batch_parts, "PIECE_BYTES", 1 << 14)
    (batch, *_) = packed(length).batches
    for process in range(PROCESSES):
        sent = sum(len(encode_frame(*frame)) for frame in part_frames(batch, mesh, process))
        content = part_bytes(batch, mesh, process)
        blocks = len(shard_batch.process_blocks(mesh, process, "tokens", batch["tokens"].shape))
        assert content < sent <= content + frame_overhead(content, blocks, piece_bytes=1 << 14, rows=8)


def test_parts_of_another_process_are_refused(mesh, monkeypatch):
    (batch,) = packed().batches
    monkeypatch.setattr(batch_parts, "process_index", lambda: 3)
    reader = BatchPartReader(mesh)
    with pytest.raises(FrameError, match="lacks nothing of"):
        for frame in part_frames(batch, mesh, 0):
            reader.add(*frame)


def test_a_batch_that_does_not_divide_is_refused():
    (batch,) = packed().batches
    mesh = make_mesh(jax.devices()[:6], data=3, context=2)
    with pytest.raises(UserError, match="A batch of 8 rows does not divide over 3 devices"):
        next(iter([*part_frames(batch, mesh, 0)]))


def test_arrays_on_the_mesh_are_those_of_the_whole_batch():
    (batch,) = packed().batches
    for sizes in MESHES:
        mesh = make_mesh(jax.devices(), **sizes)
        for name, array in shard_batch.shard_batch(batch, mesh).items():
            np.testing.assert_array_equal(np.asarray(array), whole(batch, mesh)[name])
