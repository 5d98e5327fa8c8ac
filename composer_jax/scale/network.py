"""Bandwidth of mesh axes, derived from the devices' coordinates on the torus, and the time of collectives over them.

A TPU slice is a torus of chips with one link to each neighbour, in both directions at once. A mesh axis is a set of
parallel lines of devices through it. Along every dimension of the torus that these lines span:

- a whole ring: both links of a chip transfer, so 2 b bytes per second for links of b bytes per second;
- a contiguous part, or a dimension that is not a ring: the chip at the end has one link, so b;
- every s-th chip: s lines share each link, so b/s, or 2 b/s if the line goes all around a ring.

Dimensions transfer in parallel (a gather over two of them runs two rings at once), so their bandwidths B_d add up:
B = sum_d B_d. With n devices and an array of V bytes (its largest form, scale/costs.py) a collective takes

- all_gather, reduce_scatter: (n-1)/n V / B, because each chip receives or sends all but its own part;
- all_reduce: twice that, for a reduce_scatter and an all_gather;
- permute to the neighbour: V / b, over one link;
- all_to_all: the bisection is the bottleneck. In a ring of m chips, each with V bytes to distribute, m V/4 bytes cross
  the bisection in each direction over two links: V m / (8 b), or V m / (4 b) over one link (no ring). Dimensions
  transfer in parallel and the slowest determines the time: max_d V m_d / (4 B_d).

Hops add latency: a message travels half of every ring, or the whole of every line.
("How to Scale Your Model", jax-ml.github.io/scaling-book/sharding, has the same derivation.)

Devices on one chip (TPU7x) share its links, so each has an equal part of b. Traffic between the two is counted as
traffic over the links.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from composer_jax.parallel.chips import Chip
from composer_jax.scale.costs import Collective
from composer_jax.scale.efficiency import Efficiency


@dataclasses.dataclass(frozen=True)
class Span:
    """The part of a mesh axis's lines along one dimension of the torus."""

    chips: int
    """Chips on one line."""
    links: float
    """Links of b bytes per second that a chip has for it, in one direction: 2 on a ring."""

    @property
    def is_ring(self) -> bool:
        return self.chips > 2 and self.links > 1

    @property
    def hops(self) -> float:
        return self.chips / 2 if self.is_ring else self.chips - 1


def spans(mesh: Mesh, axes: Sequence[str], torus: Sequence[int], rings: Sequence[bool]) -> list[Span]:
    """Returns the spans of these mesh axes' lines along the dimensions of the torus.

    Lines that are not boxes of chips (a diagonal) count as a path along single links.

    Args:
      torus: chips in each dimension.
      rings: which dimensions are rings.
    """
    line = mesh.devices[tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)]
    coords = np.array([device.coords for device in line.ravel()])[:, : len(torus)]
    result = []
    for dimension, size in enumerate(torus):
        at = np.unique(coords[:, dimension])
        if len(at) < 2:
            continue
        stride = int(np.diff(at).min())
        around = rings[dimension] and len(at) * stride == size
        result.append(Span(len(at), (2.0 if around else 1.0) / stride))
    chips = len(np.unique(coords, axis=0))
    return result if math.prod(span.chips for span in result) == chips else [Span(chips, 1.0)]


class Network:
    """Bandwidth and time of collectives over the axes of a mesh on a slice."""

    def __init__(self, mesh: Mesh, chip: Chip, torus: Sequence[int], efficiency: Efficiency):
        self.mesh, self.chip, self.torus, self.efficiency = mesh, chip, tuple(torus), efficiency
        self.link_bandwidth = chip.link_bandwidth / chip.devices
        self._spans: dict[tuple[str, ...], list[Span]] = {}

    def spans(self, axes: tuple[str, ...]) -> list[Span]:
        """Returns the spans of the axes; an axis within one chip counts as two neighbouring chips."""
        if axes not in self._spans:
            across = spans(self.mesh, axes, self.torus, self.chip.ring_dims(self.torus))
            self._spans[axes] = across or [Span(math.prod(self.mesh.shape[a] for a in axes), 1.0)]
        return self._spans[axes]

    def bandwidth(self, axes: tuple[str, ...]) -> float:
        """Returns the peak bytes per second of a device, in one direction, for a gather over these axes."""
        return self.link_bandwidth * sum(span.links for span in self.spans(axes))

    def seconds(self, collective: Collective) -> float:
        """Returns the seconds of one collective that shares no link with others; formulas in the module's docstring."""
        across = self.spans(collective.axes)
        if collective.pattern == "permute":
            slowest = self.link_bandwidth * min(1.0, *(span.links for span in across))
            transfer = collective.bytes / slowest
        elif collective.pattern == "all_to_all":
            transfer = max(collective.bytes * span.chips / (4 * self.link_bandwidth * span.links) for span in across)
        else:
            transfer = collective.bytes_sent(self.mesh.shape) / self.bandwidth(collective.axes)
        hops = 1.0 if collective.pattern == "permute" else sum(span.hops for span in across)
        return transfer / self.efficiency.links + hops * self.efficiency.hop_seconds
