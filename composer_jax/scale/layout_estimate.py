"""An estimate of a layout's seconds and memory without tracing it, to choose the layouts that are worth a trace.

Seconds: computation is that of the config's own traced layout, per token of a device, corrected for what is recomputed,
for weights that every chunk of experts reads again, and for keys that every device of a row expands; collectives are
counted from the weights and the tokens and take the time of their links (scale/network.py); what overlaps is one of
the assumptions of scale/roofline.py. Bytes are those of train/step_memory.py. Every layout that is reported is traced,
and compiled on request.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models.attention_kinds import attention_kind
from composer_jax.parallel.sharding import EXPERT_AXES, bytes_per_device
from composer_jax.scale.costs import Collective
from composer_jax.scale.efficiency import Efficiency
from composer_jax.scale.layout import Layout
from composer_jax.scale.network import Network
from composer_jax.scale.plan import PlacedStep
from composer_jax.scale.roofline import PREDICTION, is_weight_collective
from composer_jax.train.step_memory import TEMPORARIES, Activations, PlacedWeights

BACKWARD = 2.6
"""Attention's backward pass over its forward pass: five products of scores and values instead of two, for MLA's widths
(ops/splash.py)."""
READS_OF_EXPERTS = 8.0
"""How often a chunk of tokens moves the experts' weights or their gradients through HBM, forward and backward."""
READS_OF_KEYS = 26.0
"""How often MLA's expanded keys and values, of all tokens of a row, move through HBM in a step; from traces of K2.5."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    seconds: float
    """Of a step."""
    seconds_per_token: float
    """Of a step, over its tokens."""
    bytes: float
    """Of one device."""


class LayoutEstimator:
    """Estimates layouts of one config on one slice, relative to the config's own layout."""

    def __init__(
        self, placed: PlacedStep, predicted: Mapping[str, Any], own: Layout, tokens: int, overlap: str = PREDICTION
    ):
        """placed, predicted: of the layout `own` (scale/plan.py). tokens: of a row. overlap: one of OVERLAPS."""
        self._overlap = overlap
        self.tpus, self.model_def, self.own, self.tokens = placed.tpus, placed.step.model_def, own, tokens
        self._profile = predicted["profile_seconds"]
        program = placed.step.programs["gradient"]
        stored = bytes_per_device(program.resident["params"])
        # Moments, master weights and the gradient are sharded like the weights.
        self._state_over_weights = (
            stored + bytes_per_device(program.resident["optimizer"]) + bytes_per_device(program.outputs["gradient"])
        ) / stored
        weights = jax.tree.leaves(self.model_def.shapes()[0])
        self._parameters = sum(weight.size for weight in weights)
        self._whole_state = self._state_over_weights * sum(weight.size * weight.dtype.itemsize for weight in weights)
        self._width = np.dtype(self.model_def.config.compute_dtype).itemsize
        # Bytes of a number of a gradient that devices sum, over those of a gathered weight.
        self._reduced = jnp.dtype(self.model_def.reduce_dtype).itemsize / self._width
        self._placed: dict[tuple[int, ...], tuple[PlacedWeights, Network]] = {}

    def estimate(self, layout: Layout) -> Estimate:
        """Returns the estimate of a layout.

        Raises:
          UserError: a weight does not divide over the layout's mesh.
        """
        weights = self._place(layout)[0]
        hidden, exposed = self._communication(layout, weights)
        # A loop over experts' rows is a region of its own: no collective of its layer overlaps with it.
        loops = self._profile.get("grouped_matmul", 0.0) * self._work(layout) / self._work(self.own)
        computation = self._computation(layout, weights) - loops
        seconds = (
            loops
            + {
                "no_overlap": computation + hidden + exposed,
                "weight_gathers_overlap": max(computation, hidden) + exposed,
                "full_overlap": max(computation, hidden + exposed),
            }[self._overlap]
        )
        return Estimate(seconds, seconds / (layout.batch_size * self.tokens), self._bytes(layout, weights))

    def least_bytes(self, axes: tuple[int, ...], batch_size: int) -> float:
        """Returns bytes that every layout on a mesh needs at least; takes no time, because nothing is placed."""
        layout, c = dataclasses.replace(self.own, axes=axes, batch_size=batch_size), self.model_def.config
        state = self._whole_state * layout.sizes["replica"] / len(self.tpus.devices)
        kept = self._activations(layout).layer_inputs
        layer = self._parameters * self._width / c.n_layers / layout.shards(EXPERT_AXES)
        return state + kept + TEMPORARIES * self._layer_copies * layer

    @property
    def _layer_copies(self) -> float:
        """A layer's gathered weights and their gradient, over the bytes of the weights."""
        return 1 + self._reduced

    def _device_tokens(self, layout: Layout) -> float:
        return self._activations(layout).device_tokens

    def _place(self, layout: Layout) -> tuple[PlacedWeights, Network]:
        if layout.axes not in self._placed:
            mesh = self.tpus.mesh(layout.sizes)
            network = Network(mesh, self.tpus.chip, self.tpus.torus, Efficiency())
            self._placed[layout.axes] = PlacedWeights.of(self.model_def, mesh), network
        return self._placed[layout.axes]

    def _activations(self, layout: Layout) -> Activations:
        return Activations(
            self.model_def.config,
            layout.sizes,
            layout.batch_size,
            self.tokens,
            layout.dispatch,
            layout.expert_chunk,
            layout.head_chunk,
            layout.remat_saves,
            "splash",  # these are TPUs
        )

    def _communication(self, layout: Layout, weights: PlacedWeights) -> tuple[float, float]:
        """Returns the seconds of collectives that the prediction hides behind computation, and of the others."""
        c, sizes, seconds = self.model_def.config, layout.sizes, self._place(layout)[1].seconds
        token_bytes = self._device_tokens(layout) * c.d_model * self._width
        # Weights are gathered forward and, recomputed, backward; gradients are reduce-scattered.
        gathers = 2 + self._reduced
        parts = [(gathers, Collective("all_gather", axes, size)) for axes, size in weights.gathered.items()]
        parts += [(1, Collective("all_reduce", axes, size * self._reduced)) for axes, size in weights.summed.items()]
        if sizes["expert"] > 1 and layout.dispatch == "ring":
            # Tokens and results, and in the backward pass the tokens again and both gradients.
            gather = Collective("all_gather", ("expert",), token_bytes * sizes["expert"])
            parts.append((5 * c.n_moe_layers, gather))
        elif sizes["expert"] > 1 and layout.dispatch != "dense":
            rows = token_bytes * c.experts_per_token / sizes["tensor"]
            parts.append((6 * c.n_moe_layers, Collective("all_to_all", ("expert",), rows)))
        if sizes["tensor"] > 1:
            # Attention and feed-forward, forward, recomputed and backward; a ring sums the tokens of its whole group.
            group = sizes["expert"] if layout.dispatch == "ring" else 1
            reduce = Collective("all_reduce", ("tensor",), token_bytes)
            parts.append((4 * c.n_layers + 2 * group * c.n_moe_layers, reduce))
        if sizes["context"] > 1:
            entries = self._device_tokens(layout) * sizes["context"] * self._entry_width() * self._width
            parts.append((3 * c.n_layers, Collective("all_gather", ("context",), entries)))
        spent = {True: 0.0, False: 0.0}
        for times, collective in parts:
            spent[is_weight_collective(collective.axes)] += times * seconds(collective)
        return spent[True], spent[False]

    def _computation(self, layout: Layout, weights: PlacedWeights) -> float:
        scale = self._work(layout) / self._work(self.own)
        attention = self._profile.get("attention", 0.0) * _attention_passes(layout) / _attention_passes(self.own)
        others = sum(self._profile.get(kind, 0.0) for kind in ("matmul", "grouped_matmul", "hbm"))
        saved = [self._saved_seconds(self._work(at), at.remat_saves) for at in (self.own, layout)]
        again = [self._chunk_seconds(at, self._place(at)[0]) + self._expansion_seconds(at) for at in (self.own, layout)]
        return (others + attention + saved[0] - again[0]) * scale - saved[1] + again[1]

    def _work(self, layout: Layout) -> float:
        """Returns the tokens of a device over the devices that share a token's work."""
        return self._device_tokens(layout) / layout.sizes["tensor"]

    def _saved_seconds(self, tokens: float, names: tuple[str, ...]) -> float:
        """Returns the seconds of products that are not recomputed because their results are kept."""
        c, chip = self.model_def.config, self.tpus.chip
        output = c.n_heads * c.v_head_dim * c.d_model
        products = {"out_proj": output, "latents": c.d_model * self._entry_width()}
        flops = 2 * tokens * c.n_layers * sum(products.get(name, 0) for name in names)
        return flops / (chip.peak_flops / chip.devices * Efficiency().matmul)

    def _chunk_seconds(self, layout: Layout, weights: PlacedWeights) -> float:
        chip, tokens = self.tpus.chip, self._device_tokens(layout)
        chunks = math.ceil(tokens / min(layout.expert_chunk or tokens, tokens))
        moved = (chunks - 1) * READS_OF_EXPERTS * sum(weights.gathered.values())
        return moved / (chip.hbm_bandwidth / chip.devices * Efficiency().hbm)

    def _expansion_seconds(self, layout: Layout) -> float:
        """Returns the seconds in which MLA expands latents to keys and values, which every device of a row repeats."""
        c, chip = self.model_def.config, self.tpus.chip
        if c.kv_lora_rank is None:
            return 0.0
        keys = self._work(layout) * layout.sizes["context"] * c.n_layers * c.n_heads
        flops = 4 * 2 * keys * c.kv_lora_rank * (c.qk_nope_dim + c.v_head_dim)
        moved = READS_OF_KEYS * keys * (c.qk_nope_dim + c.qk_rope_dim + c.v_head_dim) * self._width
        return flops / (chip.peak_flops / chip.devices * Efficiency().matmul) + moved / (
            chip.hbm_bandwidth / chip.devices * Efficiency().hbm
        )

    def _entry_width(self) -> int:
        """Numbers per token and layer that devices with parts of a row exchange."""
        return sum(attention_kind(self.model_def.config).cache_entry(self.model_def.config).groups)

    def _bytes(self, layout: Layout, weights: PlacedWeights) -> float:
        activations = self._activations(layout)
        temporary = activations.temporaries(weights, self._layer_copies)
        return self._state_over_weights * weights.stored + activations.kept + temporary


def _attention_passes(layout: Layout) -> float:
    """Returns forward passes over attention, as which the backward pass counts BACKWARD."""
    return 1 + BACKWARD + ("attention" not in layout.remat_saves)
