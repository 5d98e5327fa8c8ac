"""A mix whose weights change: the shares of every part of a run, and exact resume."""

import json

import grain
import numpy as np
import pytest

from composer_jax.data.pipeline import Mixture

ROWS = 400


def numbers(source: int) -> grain.IterDataset:
    return grain.MapDataset.range(10**6).map(lambda i: (source, i)).to_iter_dataset()


def mixture(first, last, rows=ROWS) -> grain.IterDataset:
    return Mixture([numbers(i) for i in range(len(first))], first, last, rows)


def drawn(iterator, count) -> list[tuple[int, int]]:
    return [next(iterator) for _ in range(count)]


@pytest.mark.parametrize("first, last", [((1, 0), (0, 1)), ((3, 1, 0), (0, 1, 2)), ((2, 6), (2, 0))])
def test_every_tenth_of_a_run_has_the_shares_of_its_weights(first, last):
    sources = np.array([source for source, _ in drawn(iter(mixture(first, last)), 2 * ROWS)])
    at = np.minimum(1, np.arange(2 * ROWS) / ROWS)[:, None]
    weights = np.asarray(first) * (1 - at) + np.asarray(last) * at
    shares = weights / weights.sum(1, keepdims=True)
    tenth = ROWS // 10
    for begin in range(0, 2 * ROWS, tenth):
        part = slice(begin, begin + tenth)
        rows = np.bincount(sources[part], minlength=len(first))
        assert np.abs(rows - shares[part].sum(0)).max() < len(first)


def test_a_source_gives_its_rows_in_its_own_order():
    rows = drawn(iter(mixture((1, 2), (2, 1))), 300)
    for source in (0, 1):
        own = [i for which, i in rows if which == source]
        assert own == list(range(len(own)))


def test_resume_is_exact_through_json():
    def make():
        return iter(mixture((3, 1, 0), (0, 1, 2)))

    iterator, states, rows = make(), {}, []
    for place in range(ROWS + 103):
        if place in (0, 1, 7, ROWS, ROWS + 3):
            states[place] = json.dumps(iterator.get_state())
        rows += drawn(iterator, 1)
    for place, state in states.items():
        resumed = make()
        resumed.set_state(json.loads(state))
        assert drawn(resumed, 100) == rows[place : place + 100]
