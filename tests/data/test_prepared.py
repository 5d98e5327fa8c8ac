"""Prepared shards as a data source: rows, order, exact resume, identity."""

import json
import shutil

import numpy as np
import pytest

from composer_jax.data import prepared
from composer_jax.data.chat.load_chat_format import load_tokenizer
from composer_jax.data.packing import UNREAD
from composer_jax.data.pipeline import pretraining_batches
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.prepare import prepare
from composer_jax.data.prepare.shards import ShardedDocuments
from composer_jax.data.prepared import prepared_documents
from composer_jax.data.sources import SourceConfig, heldout_documents, make_sources
from composer_jax.data.token_source import DocumentSource, SourceInputs
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from tests.data.prepare.folders import code, make_tokenizer, write_files

S, B = 64, 4


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def made(tmp_path_factory, tok):
    """The folder of shards of two sources, and the names of the sources."""
    folder = tmp_path_factory.mktemp("prepared")
    tok.save(folder / "tokenizer" / "tokenizer.json")
    first = write_files(folder / "first", {f"m{i}.py": code(i) for i in range(60)})
    second = write_files(folder / "second", {f"m{i}.py": code(100 + i, 300) for i in range(10)})
    config = PrepareConfig(heldout_fraction=0.1, documents="file", unit_bytes=20_000)
    prepare([str(first), str(second)], str(folder / "tokenizer"), folder / "out", config)
    return str(folder / "out"), (str(first), str(second))


@pytest.fixture(scope="module")
def unheld(tmp_path_factory, tok):
    """Twelve files, and the shards made of them without held-out documents: only, tokenizer, out."""
    folder = tmp_path_factory.mktemp("unheld")
    tok.save(folder / "tokenizer" / "tokenizer.json")
    only = write_files(folder / "only", {f"m{i}.py": code(i) for i in range(12)})
    config = PrepareConfig(heldout_fraction=0, documents="file")
    prepare([str(only)], str(folder / "tokenizer"), folder / "out", config)
    return folder


def stream(made, tok, seed=0, **options):
    config = SourceConfig("prepared", options={"path": made[0], **options})
    sources = make_sources({"mine": config}, SourceInputs([], tok, 0))
    return pretraining_batches(sources, seq_len=S, batch_size=B, seed=seed)


def take(batches, count):
    return [next(batches).tokens.tolist() for _ in range(count)]


def mixed(made, tok, read_rows=None):
    """A prepared source beside one in memory, whose tokens are 3."""
    sources = make_sources({"mine": SourceConfig("prepared", options={"path": made[0]})}, SourceInputs([], tok, 0))
    memory = DocumentSource([np.full(n, 3) for n in (20, 70, 100)], tok.eod)
    sources = {name: (source, 0.7) for name, (source, _) in sources.items()} | {"memory": (memory, 0.3)}
    return pretraining_batches(
        sources, seq_len=S, batch_size=B, seed=0, final_weights={"memory": 0.6}, steps=20, read_rows=read_rows
    )


@pytest.fixture
def num_read(monkeypatch):
    """The number of bytes of each record that streams of this test have read from shards."""
    num_bytes = []

    class Noting(ShardedDocuments):
        def read_record(self, record):
            ids = super().read_record(record)
            num_bytes.append(ids.nbytes)
            return ids

    monkeypatch.setattr(prepared, "ShardedDocuments", Noting)
    return num_bytes


def test_rows_are_those_of_the_documents_in_memory(made, tok):
    documents = [document[:] for document in prepared_documents(made[0], "train", tok)]
    memory = pretraining_batches({"mine": (DocumentSource(documents, tok.eod), 1.0)}, seq_len=S, batch_size=B, seed=0)
    shards = stream(made, tok)
    for _ in range(200):  # more than an epoch
        expected, batch = next(memory), next(shards)
        for name, values in vars(expected).items():
            np.testing.assert_array_equal(getattr(batch, name), values)


def test_two_hosts_read_what_one_reads(made, tok):
    whole, hosts = mixed(made, tok), (mixed(made, tok, range(2)), mixed(made, tok, range(2, B)))
    unread = 0
    for _ in range(30):
        expected, parts = next(whole), [next(host) for host in hosts]
        merged = np.concatenate([parts[0].tokens[:2], parts[1].tokens[2:]])
        np.testing.assert_array_equal(merged, expected.tokens)
        for part, others in zip(parts, (slice(2, B), slice(2)), strict=True):
            for name in ("positions", "segments", "weights"):
                np.testing.assert_array_equal(getattr(part, name), getattr(expected, name))
            for row, of_whole in zip(part.tokens[others], expected.tokens[others], strict=True):
                left_out = (row == UNREAD).all()
                assert left_out or (row == of_whole).all()
                assert left_out != (set(of_whole) <= {3, tok.eod})  # rows in memory are in every process
                unread += left_out
        assert hosts[0].get_state() == hosts[1].get_state() == whole.get_state()
    assert 30 < unread < 30 * B


def test_a_position_resumes_on_another_number_of_hosts(made, tok):
    whole, half = mixed(made, tok), mixed(made, tok, range(2))
    take(whole, 13), take(half, 13)
    states = [json.loads(json.dumps(batches.get_state())) for batches in (whole, half)]
    expected = take(whole, 10)
    one, first, second = mixed(made, tok), mixed(made, tok, range(2)), mixed(made, tok, range(2, B))
    one.set_state(states[1])  # from two hosts to one
    assert take(one, 10) == expected
    first.set_state(states[0])  # from one host to two
    second.set_state(states[0])
    assert [a[:2] + b[2:] for a, b in zip(take(first, 10), take(second, 10), strict=True)] == expected


def test_each_of_two_hosts_reads_about_half(made, tok, num_read):
    def read_by(rows):
        num_read.clear()
        batches = mixed(made, tok, rows)
        take(batches, 30)
        batches.set_state(batches.get_state())  # waits for the batch that is read ahead
        return np.asarray([sum(num_read), len(num_read)])

    whole, first, second, none = (read_by(rows) for rows in (None, range(2), range(2, B), ()))
    assert (whole > 0).all() and (none == 0).all() and (first + second == whole).all()
    for half in (first, second):
        np.testing.assert_allclose(half / whole, 0.5, atol=0.1)


def test_a_position_is_restored_without_reading(made, tok, num_read):
    batches = mixed(made, tok)
    take(batches, 9)
    batches.set_state(batches.get_state())  # waits for the batch that is read ahead
    assert num_read
    num_read.clear()
    mixed(made, tok).set_state(batches.get_state())
    assert not num_read


def test_a_source_has_its_held_out_documents(made, tok):
    def heldout(**options):
        config = SourceConfig("prepared", options={"path": made[0], **options})
        sources = make_sources({"mine": config}, SourceInputs([], tok, 0))
        return [document[:].tolist() for document in heldout_documents(sources).get("mine", [])]

    expected = [document[:].tolist() for document in prepared_documents(made[0], "heldout", tok)]
    assert len(expected) > 2 and heldout() == expected
    assert heldout(max_heldout_tokens=len(expected[0]) + 1) == expected[:2]
    assert heldout(max_heldout_tokens=0) == []
    by_source = [heldout(sources=(name,)) for name in made[1]]
    assert sorted(by_source[0] + by_source[1]) == sorted(expected) and by_source[0]


def test_a_source_may_have_no_held_out_documents(unheld, tok):
    options = {"path": str(unheld / "out"), "sources": (str(unheld / "only"),)}
    for chosen in (options, {"path": options["path"]}):
        sources = make_sources({"mine": SourceConfig("prepared", options=chosen)}, SourceInputs([], tok, 0))
        assert heldout_documents(sources) == {}


def test_a_restored_stream_continues_with_the_next_batch(made, tok):
    batches, states, rows = stream(made, tok), {}, []
    for number in range(160):
        if number in (0, 1, 7, 150):
            states[number] = json.dumps(batches.get_state())
        rows += take(batches, 1)
    again = stream(made, tok)
    for number, state in states.items():
        again.set_state(json.loads(state))
        assert take(again, 10) == rows[number : number + 10]
    assert take(stream(made, tok, seed=1), 5) != rows[:5]


def test_other_data_has_another_identity(made, unheld, tok, tmp_path):
    shutil.copytree(unheld / "only", tmp_path / "only")
    changed = write_files(tmp_path / "only", {"m3.py": code(3).replace("load1", "load2")})
    config = PrepareConfig(heldout_fraction=0, documents="file")
    index = prepare([str(changed)], str(unheld / "tokenizer"), tmp_path / "out", config)
    assert index["fingerprint"] != json.loads((unheld / "out" / "index.json").read_text())["fingerprint"]
    other = stream((str(unheld / "out"), ()), tok)
    with pytest.raises(UserError, match="the saved position belongs to other data .*mine.fingerprint was"):
        other.set_state(stream(made, tok).get_state())


def test_sources_can_be_weighed(made, tok):
    both = prepared_documents(made[0], "train", tok)
    counts = []
    for name in made[1]:
        config = SourceConfig("prepared", options={"path": made[0], "sources": [name]})
        (source, _) = make_sources({"one": config}, SourceInputs([], tok, 0))["one"]
        counts.append(source.identity()["count"])
    assert sum(counts) == len(both) and 40 < counts[0] < 60 and counts[1] < 11
    with pytest.raises(UserError, match=r"has no source 'third'; use some of .*first, .*second"):
        stream(made, tok, sources=["third"])


def test_shards_that_do_not_fit_are_refused(made, tok, tmp_path):
    other = Tokenizer.train(["other text"] * 9, 300)
    with pytest.raises(
        UserError, match=f"was prepared with the tokenizer .*{tok.fingerprint}.*prepare the data with the"
    ):
        prepared_documents(made[0], "train", other)
    with pytest.raises(UserError, match="has no index.json; finish its preparation with launch.prepare_data first"):
        stream((str(tmp_path), ()), tok)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(UserError, match="index.json cannot be read .*; copy it again"):
        stream((str(tmp_path), ()), tok)
