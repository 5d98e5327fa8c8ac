"""The page tables on the devices are those of the sequences, and a call's bytes grow with what changed."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.frames import encode_frame
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler.page_tables import PageTables, read_program, write_program
from composer_jax.sampler.request import Request
from composer_jax.sampler.runner import Runner
from composer_jax.sampler.sequence import Limits, SequenceState
from composer_jax.scale.message_costs import CALL_HEADER_BYTES, decode_call_bytes
from tests.compilations import compiles_nothing
from tests.many import many

LIMITS = Limits(4, n_pages=40, shards=2, rows=3, prefill_shapes=((3, 8),), decode_steps=4)
LENGTH = 300
MESH = make_mesh(jax.devices()[:2], replica=2)
WRITE, READ = write_program(MESH), read_program(MESH, LENGTH)
PAGES = st.lists(st.integers(0, 39), max_size=12)


def read(tables: PageTables, array: jax.Array, sequences: list[SequenceState]) -> tuple[jax.Array, list[list[int]]]:
    """Returns the tables after a call of these sequences, and the pages that the call finds of each."""
    filled, places = [0, 0], []
    for s in sequences:
        places.append(s.shard * 3 + filled[s.shard])
        filled[s.shard] += 1
    row_B, writes = tables.rows(sequences, places, 3)
    for write in writes:
        array = WRITE(array, write)
    table_BJ = np.asarray(READ(array, row_B))
    return array, [table_BJ[place, : len(s.pages)].tolist() for s, place in zip(sequences, places, strict=True)]


@settings(max_examples=many(60), deadline=None)
@given(data=st.data())
def test_a_call_finds_the_pages_of_its_sequences(data):
    """Whatever comes, goes, is read rarely, moves to the other shard, grows by many pages or gets others."""
    tables = PageTables(LIMITS, LENGTH)
    array = tables.new_array(MESH)
    sequences = [SequenceState([1], 1, shard=n % 2) for n in range(10)]
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = data.draw(st.permutations(sequences))
        in_call = [s for shard in (0, 1) for s in [s for s in chosen if s.shard == shard][:3]]
        for s in data.draw(st.lists(st.sampled_from(in_call), unique_by=id)):
            s.pages = (s.pages + data.draw(PAGES)) * data.draw(st.sampled_from([1, 1, 1, 9])) or data.draw(PAGES)
            s.pages = s.pages[:LENGTH]
            if s.pages and data.draw(st.booleans()):
                s.pages[data.draw(st.integers(0, len(s.pages) - 1))] = 0
        array, found = read(tables, array, in_call)
        assert found == [s.pages for s in in_call]
        chosen[0].shard = 1 - chosen[0].shard


def test_two_programs_write_any_number_of_changes():
    tables = PageTables(LIMITS, LENGTH)
    array = tables.new_array(MESH)
    for write in tables.no_writes():
        array = WRITE(array, write)
    sequence = SequenceState([1], 1, shard=1)
    array, _ = read(tables, array, [sequence])
    with compiles_nothing():
        for n in range(0, LENGTH, 23):
            sequence.pages = [(n + i) % 40 for i in range(n)]
            array, found = read(tables, array, [sequence])
            assert found == [sequence.pages]


def count_bytes(sampler, monkeypatch, prompt: int) -> tuple[list[int], list[int]]:
    """Returns the bytes of NumPy inputs of each decode call, and of each write of tables, for one request."""
    calls: dict[str, list[int]] = {"decode": [], "write_tables": [], "prefill": []}
    start = Runner.start_program

    def counting(self, name, *inputs, width=None):
        calls[name].append(sum(array.nbytes for array in inputs))
        return start(self, name, *inputs, width=width)

    async def main():
        async with sampler.serving():
            await sampler.submit(Request(tuple(range(1, prompt + 1)), SamplingParams(16), 5))

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "start_program", counting)
        asyncio.run(main())
    return calls["decode"], calls["write_tables"]


def test_the_bytes_of_a_call_are_those_of_its_rows_and_of_the_changes(new_sampler, monkeypatch):
    """decode: 24 bytes a row; 12 bytes a change, in writes of 8 or 128. Neither knows how long contexts may become."""
    shorter = {"max_model_len": 40}
    for changes, rows in (({"decode_rows": (2,)}, 2), ({"decode_rows": (4,)}, 4), (shorter | {"decode_rows": (2,)}, 2)):
        sampler = new_sampler(**changes)
        decode, writes = count_bytes(sampler, monkeypatch, prompt=19)
        assert set(decode) == {24 * rows}
        assert writes[:1] == [12 * 8], "the context has 3 pages"
        assert len(writes) < len(decode) + 2, "a call whose contexts have no new page writes nothing"
        assert set(writes) == {12 * 8}


def test_many_changes_take_the_larger_write():
    sequence = SequenceState([1], 1, shard=0, pages=list(range(20)))
    tables = PageTables(dataclasses.replace(LIMITS, shards=1), LENGTH)
    _, writes = tables.rows([sequence], [0], 1)
    assert [write.shape for write in writes] == [(128, 3)]
    sequence.pages = [*sequence.pages, 7, 8]
    _, writes = tables.rows([sequence], [0], 1)
    assert [write.shape for write in writes] == [(8, 3)]
    assert tables.rows([sequence], [0], 1)[1] == []


@pytest.mark.parametrize("rows", [2, 4])
def test_a_decode_call_has_the_bytes_of_its_rows_and_of_the_pages_that_changed(new_sampler, monkeypatch, rows):
    commands: dict[str, list[int]] = {"decode": [], "write_tables": [], "prefill": []}
    start = Runner.start_program

    def counting(self, name, *inputs, width=None):
        commands[name].append(len(encode_frame({"program": name, "width": width}, inputs)))
        return start(self, name, *inputs, width=width)

    async def main(sampler):
        async with sampler.serving():
            await sampler.submit(Request(tuple(range(1, 20)), SamplingParams(16), 5))

    monkeypatch.setattr(Runner, "start_program", counting)
    asyncio.run(main(new_sampler(decode_rows=(rows,))))
    (decode,), (write,) = set(commands["decode"]), set(commands["write_tables"])
    formula = decode_call_bytes(rows, 8)
    assert formula - CALL_HEADER_BYTES < decode + write <= formula
