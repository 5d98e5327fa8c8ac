"""Links of mesh axes on invented tori, and times of collectives on them by hand."""

import types

import numpy as np
import pytest

from composer_jax.parallel.chips import CHIPS
from composer_jax.scale.costs import Collective
from composer_jax.scale.efficiency import Efficiency
from composer_jax.scale.network import Network, Span

PERFECT = Efficiency(links=1.0, hop_seconds=0.0)


def mesh_of(torus, order, **axes):
    """Devices of a torus in row-major order of the dimensions `order`, as a mesh of these axes."""
    grid = np.empty(torus, object)
    for at in np.ndindex(*torus):
        grid[at] = types.SimpleNamespace(coords=[*at, *[0] * (3 - len(at))])
    devices = grid.transpose(order).reshape(tuple(axes.values()))
    return types.SimpleNamespace(devices=devices, axis_names=tuple(axes), shape=axes)


def network(chip, torus, order=None, efficiency=PERFECT, **axes):
    return Network(mesh_of(torus, order or range(len(torus)), **axes), CHIPS[chip], torus, efficiency)


def test_an_axis_over_whole_rings_has_two_links_per_ring():
    links = network("v5p", (8, 8, 16), (0, 1, 2), expert=8, data=128)
    assert links.spans(("data",)) == [Span(8, 2.0), Span(16, 2.0)]
    assert links.bandwidth(("data",)) == 4 * 100e9
    assert links.bandwidth(("expert",)) == 2 * 100e9
    assert links.bandwidth(("expert", "data")) == 6 * 100e9


def test_a_dimension_that_is_not_a_ring_has_one_link():
    assert network("v5e", (4, 8), a=4, b=8).bandwidth(("b",)) == 50e9
    assert network("v5e", (4, 16), a=4, b=16).bandwidth(("b",)) == 2 * 50e9
    assert network("v5p", (2, 2, 4), a=4, b=4).bandwidth(("b",)) == 100e9  # less than a cube of 4x4x4


def test_a_contiguous_piece_of_a_ring_has_one_link_and_a_strided_one_shares():
    # 16 = context 4 (slow) x tensor 4 (fast) along the one dimension
    links = network("v5p", (4, 4, 16), data=16, context=4, tensor=4)
    assert links.spans(("tensor",)) == [Span(4, 1.0)]
    assert links.spans(("context",)) == [Span(4, 2.0 / 4)]
    assert links.spans(("context", "tensor")) == [Span(16, 2.0)]


def test_a_diagonal_counts_as_a_path():
    mesh = mesh_of((2, 2), (0, 1), a=2, b=2)
    mesh.devices[:, 1] = mesh.devices[::-1, 1].copy()  # a now runs along the sides, b across the diagonals
    mesh.devices[:] = [[mesh.devices[0, 0], mesh.devices[0, 1]], [mesh.devices[1, 0], mesh.devices[1, 1]]]
    assert Network(mesh, CHIPS["v5e"], (2, 2), PERFECT).spans(("b",)) == [Span(2, 1.0)]


def test_devices_of_one_chip_share_its_links():
    chip = CHIPS["tpu7x"]
    mesh = mesh_of((4, 4, 4), (0, 1, 2), data=64)
    mesh.devices = np.repeat(mesh.devices[:, None], 2, axis=1)
    mesh.axis_names, mesh.shape = ("data", "core"), {"data": 64, "core": 2}
    links = Network(mesh, chip, (4, 4, 4), PERFECT)
    assert links.bandwidth(("data",)) == 6 * 100e9 / 2
    assert links.spans(("core",)) == [Span(2, 1.0)]


@pytest.mark.parametrize(
    ("pattern", "seconds"),
    [
        ("all_gather", 7 / 8 * 8e9 / 200e9),
        ("reduce_scatter", 7 / 8 * 8e9 / 200e9),
        ("all_reduce", 2 * 7 / 8 * 8e9 / 200e9),
        ("all_to_all", 8e9 * 8 / (8 * 100e9)),
        ("permute", 8e9 / 100e9),
    ],
)
def test_times_on_a_ring_of_eight(pattern, seconds):
    links = network("v5p", (8, 8, 16), expert=8, data=128)
    assert links.seconds(Collective(pattern, ("expert",), 8e9)) == pytest.approx(seconds)


def test_an_exchange_on_a_line_has_half_the_links_in_the_middle():
    ring, line = network("v5e", (4, 16), a=4, b=16), network("v6e", (4, 8), a=4, b=8)
    assert ring.seconds(Collective("all_to_all", ("b",), 1e9)) == pytest.approx(1e9 * 16 / (8 * 50e9))
    assert line.seconds(Collective("all_to_all", ("b",), 1e9)) == pytest.approx(1e9 * 8 / (4 * 100e9))


def test_efficiency_and_hops_add_time():
    efficiency = Efficiency(links=0.5, hop_seconds=1e-6)
    links = network("v5p", (8, 8, 16), efficiency=efficiency, expert=8, data=128)
    gather = Collective("all_gather", ("data",), 128e6)
    assert links.seconds(gather) == pytest.approx(127e6 / 400e9 / 0.5 + (8 / 2 + 16 / 2) * 1e-6)
