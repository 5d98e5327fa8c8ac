"""Published steps against our predictions for the same network, batch and slice."""

import pytest

from benchmarks.published_steps import RUNS, compare

pytestmark = pytest.mark.usefixtures("libtpu")


# The others compile for half a minute each.
QUICKEST = "v5p-256-chips"
CASES = [pytest.param(name, marks=() if name == QUICKEST else pytest.mark.slow) for name in RUNS]


@pytest.mark.parametrize("name", CASES)
def test_a_prediction_is_near_the_measured_step(name):
    """The first run set the constants; the others are within an eighth of the measurement, on the fast side."""
    figures = compare(RUNS[name])
    assert figures["model_flops_over_theirs"] == pytest.approx(1, abs=1e-3)
    assert 0.85 < figures["predicted_over_published"] < 1.05
