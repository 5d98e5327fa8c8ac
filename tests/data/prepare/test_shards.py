"""Shards hold documents of any length, and give any piece of any of them."""

import subprocess
import sys

import numpy as np
import pytest

from composer_jax.data.prepare.shards import RECORD_TOKENS, ShardedDocuments, record_counts, token_dtype, write_shard
from composer_jax.errors import UserError


def made(folder, lengths, dtype="<u2"):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 60_000, length).astype(dtype) for length in lengths]
    half = len(documents) // 2
    written = [
        write_shard(folder / f"{i}.array_record", part) for i, part in enumerate((documents[:half], documents[half:]))
    ]
    shards = [one | {"records": int(record_counts(np.asarray(one["lengths"])).sum())} for one in written]
    return documents, shards, np.asarray([n for one in written for n in one["lengths"]], np.uint32)


LENGTHS = [1, 5, RECORD_TOKENS - 1, RECORD_TOKENS, RECORD_TOKENS + 1, 3 * RECORD_TOKENS, 2, 40_000]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_any_slice_of_any_document(tmp_path, dtype):
    documents, shards, lengths = made(tmp_path, LENGTHS, dtype)
    read = ShardedDocuments(tmp_path, shards, lengths, np.dtype(dtype))
    assert [len(document) for document in read] == LENGTHS
    rng = np.random.default_rng(1)
    for expected, document in zip(documents, read, strict=True):
        np.testing.assert_array_equal(document[:], expected)
        for start, stop in rng.integers(0, len(expected) + 1, (20, 2)):
            np.testing.assert_array_equal(document[start:stop], expected[start:stop])


def test_chosen_documents(tmp_path):
    documents, shards, lengths = made(tmp_path, LENGTHS)
    chosen = np.arange(len(LENGTHS)) % 2 == 1
    read = ShardedDocuments(tmp_path, shards, lengths, np.dtype("<u2"), chosen)
    assert len(read) == 4
    for expected, document in zip(documents[1::2], read, strict=True):
        np.testing.assert_array_equal(document[:], expected)


def test_the_bytes_depend_on_the_documents_only(tmp_path):
    first, second = made(tmp_path / "a", LENGTHS)[1], made(tmp_path / "b", LENGTHS)[1]
    assert first == second
    assert not [path for path in tmp_path.rglob(".*")]


def test_a_file_of_another_size_is_refused(tmp_path):
    _, shards, lengths = made(tmp_path, LENGTHS)
    path = tmp_path / "1.array_record"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"1.array_record has \d+ bytes and was written with \d+; copy it again"):
        ShardedDocuments(tmp_path, shards, lengths, np.dtype("<u2"))


def test_the_smallest_type_that_holds_all_ids():
    assert token_dtype(65_536) == np.uint16 and token_dtype(65_537) == np.uint32


def test_a_full_disk_is_one_sentence_and_leaves_no_file(tmp_path):
    script = """
import resource, sys
from pathlib import Path
import numpy as np
from composer_jax.data.prepare.shards import write_shard
from composer_jax.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
noise = np.random.default_rng(0).integers(0, 65536, 1_000_000).astype("<u2")
try:
    write_shard(Path(sys.argv[1]) / "a.array_record", [noise])
except UserError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert f"cannot write {tmp_path}/a.array_record: " in run.stdout and "free some space" in run.stdout, run.stderr
    assert list(tmp_path.iterdir()) == []
