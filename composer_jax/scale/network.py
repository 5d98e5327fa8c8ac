"""How fast a mesh axis talks, read off where its devices lie on the torus; and how long a collective takes over it.

A TPU slice is a torus of chips with one link to each neighbour, in both directions at once. A mesh axis is a set of
parallel lines of devices through it. Along every dimension of the torus that these lines span:

- all of a closed ring: both links of a chip carry, 2 b bytes per second for links of b bytes per second;
- a contiguous piece, or a dimension that does not close: the chip at the end has one link, so b;
- every s-th chip: s lines share each link, so b/s, or 2 b/s on a closed ring that the line goes all around.

Dimensions work side by side (a gather over two of them runs two rings at once), so their bandwidths B_d add up:
B = sum_d B_d. With n devices and an array of V bytes (scale/costs.py: where it is largest) a collective takes

- all_gather, reduce_scatter: (n-1)/n V / B, each chip receives or sends all but its own part;
- all_reduce: twice that, a reduce_scatter and an all_gather;
- permute to the neighbour: V / b, one link;
- all_to_all: the links in the middle decide. In a ring of m chips, each with V bytes to spread, m V/4 bytes cross the
  middle in each direction, over two links: V m / (8 b), or with one link (no ring) V m / (4 b). Over several dimensions
  they work side by side and the slowest decides: max_d V m_d / (4 B_d).

To each comes the time of the hops: a message passes through half of every ring, or along all of every line.
("How to Scale Your Model", jax-ml.github.io/scaling-book/sharding, derives the same.)

Devices that share a chip (TPU7x) share its links: each gets its part of b. Traffic between the two themselves is
counted as if it went over the links.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from composer_jax.scale.chips import Chip, Efficiency
from composer_jax.scale.costs import Collective


@dataclasses.dataclass(frozen=True)
class Span:
    """One dimension of the torus, as the lines of a mesh axis cross it."""

    chips: int
    """On one line."""
    links: float
    """How many links of b bytes per second a chip has for it, in one direction: 2 on a ring."""

    @property
    def closed(self) -> bool:
        return self.chips > 2 and self.links > 1

    @property
    def hops(self) -> float:
        return self.chips / 2 if self.closed else self.chips - 1


def spans(mesh: Mesh, axes: Sequence[str], torus: Sequence[int], closed: Sequence[bool]) -> list[Span]:
    """How the lines of these mesh axes, taken together, cross the torus. Lines that are no boxes of chips (a diagonal)
    count as a path along single links.

    Args:
      torus: chips in every dimension.
      closed: which of them are rings.
    """
    line = mesh.devices[tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)]
    coords = np.array([device.coords for device in line.ravel()])[:, : len(torus)]
    found = []
    for dimension, size in enumerate(torus):
        at = np.unique(coords[:, dimension])
        if len(at) < 2:
            continue
        stride = int(np.diff(at).min())
        around = closed[dimension] and len(at) * stride == size
        found.append(Span(len(at), (2.0 if around else 1.0) / stride))
    chips = len(np.unique(coords, axis=0))
    return found if math.prod(span.chips for span in found) == chips else [Span(chips, 1.0)]


class Network:
    """The links of a slice as a mesh uses them."""

    def __init__(self, mesh: Mesh, chip: Chip, torus: Sequence[int], efficiency: Efficiency):
        self.mesh, self.chip, self.torus, self.efficiency = mesh, chip, tuple(torus), efficiency
        self.link = chip.link_bandwidth / chip.devices
        self._spans: dict[tuple[str, ...], list[Span]] = {}

    def spans(self, axes: tuple[str, ...]) -> list[Span]:
        """Those of the axes; an axis within one chip counts as two chips side by side."""
        if axes not in self._spans:
            found = spans(self.mesh, axes, self.torus, self.chip.ring_dims(self.torus))
            self._spans[axes] = found or [Span(math.prod(self.mesh.shape[a] for a in axes), 1.0)]
        return self._spans[axes]

    def bandwidth(self, axes: tuple[str, ...]) -> float:
        """Published bytes per second, in one direction, that a device has for a gather over these axes."""
        return self.link * sum(span.links for span in self.spans(axes))

    def seconds(self, collective: Collective) -> float:
        """Time of one collective that has the links for itself, as in the module's docstring."""
        found = self.spans(collective.axes)
        if collective.pattern == "permute":
            least = self.link * min(1.0, *(span.links for span in found))
            moving = collective.bytes / least
        elif collective.pattern == "all_to_all":
            moving = max(collective.bytes * span.chips / (4 * self.link * span.links) for span in found)
        else:
            moving = collective.bytes_sent(self.mesh.shape) / self.bandwidth(collective.axes)
        hops = 1.0 if collective.pattern == "permute" else sum(span.hops for span in found)
        return moving / self.efficiency.links + hops * self.efficiency.hop_seconds
