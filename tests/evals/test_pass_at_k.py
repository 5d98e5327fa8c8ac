"""pass@k against counting all subsets."""

import itertools

import pytest

from composer_jax.evals.suite import pass_at_k


@pytest.mark.parametrize("n", [1, 3, 6])
def test_equals_the_fraction_of_subsets_with_a_solution(n):
    for solved in range(n + 1):
        attempts = [True] * solved + [False] * (n - solved)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(attempts, k))
            assert pass_at_k(n, solved, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_known_values():
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 1, 8) == 1.0
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)


@pytest.mark.parametrize(("n", "solved", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_impossible_counts_are_refused(n, solved, k):
    with pytest.raises(ValueError):
        pass_at_k(n, solved, k)
