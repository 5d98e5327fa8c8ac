"""What benchmarks.stability trains, and what it prints."""

import numpy as np
import pytest

from benchmarks import stability
from benchmarks.stability import BALANCE, CLIP, measure, rows, summarize


def test_rows_are_the_seeds_and_their_second_half_repeats_the_first():
    first, again, later, other = rows(0, 0), rows(0, 0), rows(0, 1), rows(1, 0)
    half = stability.LENGTH // 2
    np.testing.assert_array_equal(first["tokens"], again["tokens"])
    np.testing.assert_array_equal(first["tokens"][:, :half], first["tokens"][:, half:])
    assert (first["tokens"] != later["tokens"]).any() and (first["tokens"] != other["tokens"]).any()
    assert 0 <= first["tokens"].min() and first["tokens"].max() < stability.VOCABULARY


@pytest.mark.slow  # the short form is in tests/train/test_qk_clip.py
def test_a_clip_bounds_the_logits_that_its_run_measures(monkeypatch):
    monkeypatch.setitem(CLIP, "muon, clip at 20", 0.5)
    free, clipped = (measure(6, 0, name) for name in ("muon, no clip", "muon, clip at 20"))
    assert clipped["max_logit"] < free["max_logit"]
    assert (clipped["seed"], clipped["steps"]) == (0, 6) and 0 < clipped["loss"] < 10 and clipped["imbalance"] >= 1


def test_the_summary_has_a_number_of_every_run():
    made = [
        {"seed": seed, "variant": name, "loss": 1.0 + seed, "imbalance": 2.0, "max_logit": None}
        for seed in (1, 0)
        for name in (*BALANCE, *CLIP)
    ]
    assert summarize(made, [0, 1])["balance 0.01"] == {
        "loss": [1.0, 2.0],
        "imbalance": [2.0, 2.0],
        "max_logit": [None, None],
    }
