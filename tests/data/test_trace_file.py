"""A file of traces gives back what was written."""

import numpy as np
import pytest

from composer_jax.data.trace_file import read_traces, write_traces
from composer_jax.errors import UserError


def test_traces_come_back_in_their_order(tmp_path):
    traces = [([5, 70_000, 7], [False, True, True]), (np.array([9], np.uint16), np.array([True]))]
    path = write_traces(tmp_path / "data" / "traces.npz", traces, {"reward": np.float32(0.5)})
    again = read_traces(path)
    assert [(ids.tolist(), trained.tolist()) for ids, trained in again] == [
        ([5, 70_000, 7], [False, True, True]),
        ([9], [True]),
    ]
    assert {(ids.dtype, trained.dtype) for ids, trained in again} == {(np.dtype(np.int32), np.dtype(bool))}
    with np.load(path) as file:
        assert file["reward"] == 0.5
    assert read_traces(write_traces(tmp_path / "none.npz", [])) == []


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_traces(tmp_path / "file" / "traces.npz", [([1], [True])])
