"""The estimate of difficulty: its range and its direction."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from composer_jax.tasks.repository.build import WEIGHTS, Difficulty

COUNT = st.integers(1, 5000)
LEAST = Difficulty(1, 1, 1, 1, 1)


@given(COUNT, COUNT, COUNT, COUNT, COUNT, st.sampled_from(list(WEIGHTS)))
def test_more_of_anything_is_never_easier(lines, files, entities, complexity, fails, name):
    here = Difficulty(lines, files, entities, complexity, fails)
    more = replace(here, **{name: getattr(here, name) + 1})
    assert 0 <= here.estimate <= more.estimate <= 1


def test_the_bounds_and_a_value_by_hand():
    assert sum(weight for weight, _ in WEIGHTS.values()) == 1
    assert LEAST.estimate < 0.06
    assert Difficulty(5000, 500, 500, 5000, 5000).estimate == 1
    # 0.35 * 2/3 for twenty lines, and what one of the others adds.
    assert abs(replace(LEAST, lines=20).estimate - LEAST.estimate - 0.35 * (3 ** (-1 / 20) - 1 / 3)) < 1e-3
