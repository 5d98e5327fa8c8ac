"""A read of routes moves the bytes of the wanted tokens, whatever the shards, contexts and programs."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from composer_jax.frames import encode_frame
from composer_jax.models.presets import PRESETS
from composer_jax.parallel.mesh import BATCH_AXES, make_mesh
from composer_jax.rl.workers.messages import sample_to_frame
from composer_jax.sampler.policy import Sample
from composer_jax.sampler.route_read import RouteReader, piece_sizes, read_sizes, used_pieces
from composer_jax.sampler.runner import shards_here
from composer_jax.sampler.sequence import SequenceState
from composer_jax.scale.message_costs import message_route_bytes
from tests.compilations import compiles_nothing

KIMI = PRESETS["kimi_k2_5"]
PAGE, PAGES = 32, 40
TABLE = np.random.default_rng(1).permutation(PAGES).tolist()


def test_pieces_add_up_to_any_number_of_tokens():
    for size in (1, 2, 8, 64):
        pieces = piece_sizes(size)
        assert sum(pieces) == size
        assert all(sum(pieces[i] for i in used_pieces(size, n)) == n for n in range(1, size + 1))
    assert read_sizes(32_768) == (512, 4096, 32_768) and read_sizes(64) == (64,) and read_sizes(600) == (512, 1024)


def new_reader(shards: int):
    """(reader of K2.5's routes, a cache of random ones)."""
    mesh = make_mesh(jax.devices()[:shards], data=shards)
    routes = np.random.default_rng(0).integers(0, KIMI.n_experts, (shards * PAGES, PAGE, 512), np.int16)
    cache = jax.device_put(routes, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
    return RouteReader(KIMI, mesh, PAGE, shards, PAGES * PAGE), cache


def read(reader: RouteReader, cache, wanted):
    """(routes, bytes that leave devices, bytes of the frame between processes)."""
    (numbers,) = reader.calls(wanted)
    assert numbers == list(range(len(wanted)))
    spans = reader.spans(wanted)
    pieces = reader.start(cache, spans)
    frame = encode_frame(*shards_here(pieces))
    return reader.finish(spans, pieces), sum(piece.nbytes for piece in pieces), len(frame)


def row_of(shard: int, tokens: int, pages=TABLE) -> SequenceState:
    return SequenceState([1] * (tokens + 1), 0, shard=shard, computed=tokens, pages=pages)


@pytest.mark.parametrize(("shards", "context"), [(1, 100), (4, 100), (4, 600)])
def test_bytes_grow_with_tokens_and_with_nothing_else(shards, context):
    reader, cache = new_reader(shards)
    counted = []
    for tokens in (250, 500):
        (routes,), from_device, between = read(reader, cache, [(row_of(shards - 1, context + tokens), context)])
        shard = np.asarray(cache).reshape(shards, PAGES, PAGE, -1)[-1]
        expected = shard[TABLE].reshape(PAGES * PAGE, -1)[context : context + tokens, :480]
        np.testing.assert_array_equal(routes.reshape(tokens, -1), expected)
        assert routes.shape == (tokens, 60, 8) and routes.dtype == np.uint16
        said = message_route_bytes(KIMI, tokens)
        assert from_device == said.device_to_host == routes.nbytes == tokens * 60 * 8 * 2
        sample = Sample([], [], [], "stop", routing=routes, routing_start=context)
        frame = len(encode_frame(*sample_to_frame(sample)))
        for actual, formula in ((between, said.host_to_host), (frame, said.frame)):
            assert formula <= actual <= formula + 0.01 * 480_000
        counted.append(from_device)
    assert counted[1] == 2 * counted[0]
    assert message_route_bytes(KIMI, 500, same_process=True).host_to_host == 0


def test_requests_of_several_shards_share_one_read_and_few_programs_serve_all_lengths():
    reader, cache = new_reader(4)
    for size in reader.sizes:
        jax.block_until_ready(reader.start(cache, reader.padding(size)))
    rows = [(row_of(2, 70, TABLE[:3]), 3), (row_of(0, 40), 39), (row_of(2, 333, TABLE[3:]), 7)]
    with compiles_nothing():
        routes, from_device, _ = read(reader, cache, rows)
        for n in (1, 31, 511, 512, 513, 1200):
            assert len(read(reader, cache, [(row_of(1, n), 0)])[0][0]) == n
    assert from_device == (67 + 1 + 326) * 960
    for (row, start), actual in zip(rows, routes, strict=True):
        shard = np.asarray(cache).reshape(4, PAGES, PAGE, -1)[row.shard]
        expected = shard[row.pages].reshape(-1, 512)[start : row.computed, :480]
        np.testing.assert_array_equal(actual.reshape(len(actual), -1), expected)


def test_a_shard_with_more_tokens_than_the_largest_read_is_read_by_several():
    reader, _ = new_reader(1)
    assert reader.sizes == (512, 2048)
    wanted = [(row_of(0, 1200), 0), (row_of(0, 5), 5), (row_of(0, 848), 0), (row_of(0, 1), 0)]
    assert reader.calls(wanted) == [[0, 2], [3]]
