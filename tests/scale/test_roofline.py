"""Times of invented regions on an invented network, computed by hand."""

import types

import pytest

from composer_jax.parallel.chips import Chip
from composer_jax.scale.costs import Collective, Operation, Region
from composer_jax.scale.efficiency import Efficiency
from composer_jax.scale.roofline import is_weight_collective, largest_costs, operation_seconds, predict_times

CHIP = Chip(
    "invented", "Invented", peak_flops=100.0, hbm_bandwidth=10.0, hbm_usable=1.0, link_bandwidth=1.0, torus_dims=2
)
PERFECT = Efficiency(matmul=1.0, attention=0.5, grouped_matmul=1.0, hbm=1.0, links=1.0, hop_seconds=0.0)
NETWORK = types.SimpleNamespace(chip=CHIP, efficiency=PERFECT, seconds=lambda collective: collective.bytes)


def test_the_slower_of_arithmetic_and_memory_determines_the_time():
    def seconds(kind, flops, hbm_bytes):
        return operation_seconds(Operation(kind, flops, hbm_bytes), CHIP, PERFECT)

    assert seconds("matmul", 300.0, 20.0) == 3.0
    assert seconds("matmul", 300.0, 50.0) == 5.0
    assert seconds("attention", 300.0, 50.0) == 6.0
    assert seconds("hbm", 0.0, 20.0) == 2.0


def test_half_a_chip_has_half_of_its_peaks():
    half = Chip("halves", "Halves", 100.0, 10.0, 1.0, 1.0, 3, devices=2)
    assert operation_seconds(Operation("matmul", 300.0, 20.0), half, PERFECT) == 6.0
    assert operation_seconds(Operation("hbm", 0.0, 20.0), half, PERFECT) == 4.0


def layer(times=1.0):
    return Region(
        "layer",
        times,
        operations=[Operation("matmul", 400.0, 0.0, "a"), Operation("hbm", 0.0, 10.0, "b")],  # 4 + 1 seconds
        collectives=[
            Collective("all_gather", ("data",), 7.0, "a"),
            Collective("reduce_scatter", ("expert",), 2.0, "b"),
            Collective("all_reduce", ("data", "expert"), 1.0, "b"),
        ],
    )


def test_overlap_under_the_three_assumptions():
    times = predict_times(layer(), NETWORK)
    assert (times.no_overlap, times.weight_gathers_overlap, times.full_overlap) == (15.0, 7.0 + 3.0, 10.0)
    assert times.profile == {"matmul": 4.0, "hbm": 1.0, "data": 7.0, "expert": 2.0, "data+expert": 1.0}


@pytest.mark.parametrize(
    ("axes", "hidden"),
    [
        (("data",), True),
        (("replica",), True),
        (("data", "context"), True),  # weights are stored over both
        (("context",), False),  # keys and values
        (("expert",), False),
        (("tensor",), False),
        (("data", "expert"), False),
    ],
)
def test_weight_collectives_overlap_and_token_collectives_do_not(axes, hidden):
    assert is_weight_collective(axes) is hidden


def test_regions_follow_each_other_and_repeat():
    whole = Region("step", 2.0, operations=[Operation("hbm", 0.0, 30.0)], regions=[layer(3.0)])
    times = predict_times(whole, NETWORK)
    assert (times.no_overlap, times.weight_gathers_overlap, times.full_overlap) == (
        2 * (3 + 45),
        2 * (3 + 30),
        2 * (3 + 30),
    )
    assert sum(times.profile.values()) == times.no_overlap


def test_the_largest_come_first_with_repetitions():
    costs = largest_costs(Region("step", regions=[layer(3.0)]), NETWORK, most=2)
    assert [(f["scope"], f["kind"], f["seconds"]) for f in costs] == [
        ("a", "all_gather over data", pytest.approx(21.0)),
        ("a", "matmul", pytest.approx(12.0)),
    ]
