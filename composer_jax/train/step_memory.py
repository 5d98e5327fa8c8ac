"""Bytes of one device in a training step, from shapes and shardings: nothing is compiled.

Weights, optimizer state and gradient are exact. Values kept for the backward pass follow from their shapes. The largest
temporaries of a layer or of the head are counted and multiplied by TEMPORARIES.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from composer_jax.models.attention_kinds import attention_form, attention_kind
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.ops.attention_form import AttentionForm
from composer_jax.ops.cudnn_attention import backward_workspace
from composer_jax.parallel.mesh import TOKEN_AXES
from composer_jax.parallel.sharding import FSDP_AXES, bytes_per_device
from composer_jax.train.learner import HOST_MEMORY, Learner

TEMPORARIES = 1.4
"""The compiler's temporaries over ours, from K2.5 at 32k on v5p:8x8x16: compiled with expert=8 context=2."""
OFFLOAD_COPIES = 2
"""Copies of an offloaded optimizer state that the update holds on the device: the old one and the new one. XLA plans
2.2 for the small network of tests/scale on v5e:2x2 (docs/design.md, optimizer.offload)."""


def arrays_in(tree: Any, *, host: bool) -> list[Any]:
    """Returns the arrays of a tree that lie in the host's memory (optimizer.offload), or those that do not."""
    return [a for a in jax.tree.leaves(tree) if (a.sharding.memory_kind == HOST_MEMORY) == host]


@dataclasses.dataclass(frozen=True)
class PlacedWeights:
    """What a mesh makes of the network's weights, in bytes of one device."""

    stored: float
    """Its shards in storage."""
    gathered: Mapping[tuple[str, ...], float]
    """Gathered FSDP axes -> the weights after the gather, in the compute dtype."""
    summed: Mapping[tuple[str, ...], float]
    """Axes over which whole gradients of shards are summed -> these gradients, in the compute dtype."""
    vocab: float
    """The largest gathered weight without layers: the table or the head."""

    @classmethod
    def of(cls, model_def: ModelDef, mesh: Mesh) -> "PlacedWeights":
        """Raises UserError if a weight does not divide over the mesh."""
        shapes, shardings = model_def.shapes()[0], model_def.shardings(mesh)[0]
        width = model_def.config.dtype.itemsize
        gathered: dict[tuple[str, ...], float] = {}
        summed: dict[tuple[str, ...], float] = {}
        stored = vocab = 0.0
        for weight, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True):
            axes = [a for entry in sharding.spec if entry for a in ((entry,) if isinstance(entry, str) else entry)]
            shard = weight.size / math.prod(mesh.shape[a] for a in axes)
            stored += shard * weight.dtype.itemsize
            fsdp = tuple(a for a in axes if a in FSDP_AXES)
            whole = shard * math.prod(mesh.shape[a] for a in fsdp) * width
            if fsdp:
                gathered[fsdp] = gathered.get(fsdp, 0.0) + whole
            if rest := tuple(a for a in TOKEN_AXES if a not in axes and mesh.shape[a] > 1):
                summed[rest] = summed.get(rest, 0.0) + shard * width
            if weight.ndim == 2:
                vocab = max(vocab, whole)
        return cls(stored, gathered, summed, vocab)


@dataclasses.dataclass(frozen=True)
class Activations:
    """What a step computes on a batch and keeps for the backward pass, in bytes of one device."""

    config: ModelConfig
    """Its dispatch, expert_chunk, head_chunk and remat_saves are those below."""
    sizes: Mapping[str, int]
    """Mesh axis -> devices along it."""
    rows: int
    """Of the batch, on all devices."""
    tokens: int
    """Of a row."""
    dispatch: str
    expert_chunk: int | None
    head_chunk: int | None
    remat_saves: tuple[str, ...]
    form: AttentionForm
    """Of attention on these devices, not "auto"."""

    @classmethod
    def of(
        cls, config: ModelConfig, sizes: Mapping[str, int], rows: int, tokens: int, form: AttentionForm
    ) -> "Activations":
        """Returns those of a network that is laid out as its config says."""
        chunks = config.expert_chunk, config.head_chunk
        return cls(config, sizes, rows, tokens, config.dispatch, *chunks, config.remat_saves, form)

    @property
    def device_tokens(self) -> float:
        """The tokens of a device."""
        return self.rows * self.tokens / math.prod(self.sizes[axis] for axis in TOKEN_AXES)

    @property
    def layer_inputs(self) -> float:
        """The inputs of all layers, which every backward pass through the layers needs."""
        return self.device_tokens * self.config.n_layers * self.config.d_model * self._width

    @property
    def kept(self) -> float:
        """What is kept for the backward pass: the inputs of layers and remat_saves."""
        c, width = self.config, self._width
        names = {
            "latents": sum(attention_kind(c).cache_entry(c).groups) * width,
            "attention": c.n_heads / self.sizes["tensor"] * (c.v_head_dim * width + 4),
            "out_proj": c.d_model * width,
            "feed_forward": c.d_model * width,
        }
        return self.layer_inputs + self.device_tokens * c.n_layers * sum(names[name] for name in self.remat_saves)

    def temporaries(self, weights: PlacedWeights, layer_copies: float) -> float:
        """Returns the largest temporaries of a layer or of the head.

        layer_copies: a layer's gathered weights and their gradient, over the bytes of the weights.
        """
        layer = layer_copies * sum(weights.gathered.values()) / self.config.n_layers
        logits = min(self.head_chunk or self.device_tokens, self.device_tokens)
        logits *= self.config.vocab_size / self.sizes["tensor"]
        # The weight, a chunk's gradient, and the float32 sum of the gradients of the chunks.
        head = logits * (4 + self._width) + (2 + 4 / self._width) * weights.vocab
        attention = TEMPORARIES * (layer + self._attention) + self._cudnn_workspace
        return max(attention, TEMPORARIES * max(layer + self._experts, head))

    @property
    def _width(self) -> int:
        return self.config.dtype.itemsize

    @property
    def _experts(self) -> float:
        """The tokens of a group, their float32 sums and gradients, and the sorted rows."""
        c, tokens = self.config, self.device_tokens
        if not c.n_experts:
            return 0.0
        chunk = min(self.expert_chunk or tokens, tokens)
        group = self.sizes["expert"] if self.dispatch == "ring" else 1
        shards = self.sizes["expert"] * self.sizes["tensor"]
        rows = min(c.capacity_factor, shards) * c.experts_per_token * chunk / self.sizes["tensor"]
        of_tokens = group * chunk * c.d_model * (self._width + 8)
        return of_tokens + rows * self._width * (3 * c.d_model + 4 * c.expert_ff_dim)

    @property
    def _attention(self) -> float:
        """Queries, keys and values with gradients; splash's partial gradients of queries or the plain scores."""
        c, tokens = self.config, self.device_tokens
        key, keys = c.qk_nope_dim + c.qk_rope_dim, tokens * self.sizes["context"]
        of_head = self._width * (2 * tokens * key + 2 * keys * (key + c.v_head_dim))
        if self.form == "splash":
            of_head += self._width * tokens * key * min(16, max(1, self.tokens / 2048))
        elif self.form == "plain":
            # In float32 and in the compute dtype. A whole row does not compute the keys after a block of queries.
            of_head += tokens * self.tokens * (4 + self._width) / (2 if self.sizes["context"] == 1 else 1)
        return self._heads * of_head

    @property
    def _cudnn_workspace(self) -> float:
        """What cuDNN takes for itself in the backward pass, of which the compiler has no temporaries."""
        if self.form != "cudnn":
            return 0.0
        c, rows = self.config, math.ceil(self.device_tokens / self.tokens)
        kv_heads = min(self._heads, (c.n_kv_heads or c.n_heads) // self.sizes["tensor"])
        width = max(c.qk_nope_dim + c.qk_rope_dim, c.v_head_dim)
        return float(backward_workspace(rows, self.tokens, self._heads, kv_heads, width))

    @property
    def _heads(self) -> int:
        """The heads of queries that attention computes at once."""
        c = self.config
        return min(c.heads_at_once or c.n_heads, c.n_heads // self.sizes["tensor"])


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """What a step of a Learner needs, in bytes of one device."""

    state: float
    """Weights, optimizer state and what else stays on the device."""
    summed: float
    """The float32 sum of the gradients of several batches; 0 where a step has one."""
    gradient: float
    """The gradient of one batch."""
    layer_inputs: float
    """Activations.layer_inputs; 0 where the layers have no backward pass."""
    activations: float
    """Kept values and the largest temporaries, by estimate."""
    update: float
    """What the update has beside state and gradients: copies of an optimizer state that lies in the host's memory."""

    @property
    def exact(self) -> float:
        """Weights, optimizer state and gradients."""
        return self.state + self.summed + self.gradient

    @property
    def least(self) -> float:
        """A lower bound. The layers' inputs are free again before the last gradient and the float32 sum are there.

        In the backward pass of a second batch the gradient of the first one exists, in the dtype of the weights.
        """
        first = self.gradient if self.summed else 0.0
        return self.state + max(self.summed + self.gradient, first + self.layer_inputs)

    @property
    def estimate(self) -> float:
        """What the step probably needs: the activations are free before the update."""
        return self.exact + max(self.activations, self.update)


class StepMemoryEstimator:
    """Estimates the memory of a Learner's steps, for batches of any shape.

    Making one traces the shapes of the weights and of the optimizer's state. An estimate is arithmetic.
    """

    def __init__(self, learner: Learner, *, beside: float = 0.0, trains_trunk: bool = True) -> None:
        """beside: bytes of a device that are in use beside the Learner's state. trains_trunk: whether the layers have a
        backward pass."""
        state, definition = learner.abstract_state(), learner.definition
        self._config, self._mesh, self._trains_trunk = definition.config, learner.mesh, trains_trunk
        self._state = bytes_per_device(arrays_in(state, host=False)) + beside
        self._update = OFFLOAD_COPIES * bytes_per_device(arrays_in(state, host=True))
        self._gradient = bytes_per_device(state.params)
        self._summed = self._gradient * 4 / np.dtype(self._config.param_dtype).itemsize
        self._weights = PlacedWeights.of(definition, learner.mesh)
        # A layer's gathered weights, and their gradient.
        self._layer_copies = 1 + np.dtype(definition.reduce_dtype).itemsize / self._config.dtype.itemsize

    def estimate(self, rows: int, tokens: int, *, accumulates: bool) -> StepMemory:
        """Returns the memory of a step.

        Args:
          rows: of a batch, on all devices.
          tokens: of a row.
          accumulates: whether the step adds the gradients of several batches.
        """
        form = attention_form(self._config, self._mesh, tokens).form
        activations = Activations.of(self._config, self._mesh.shape, rows, tokens, form)
        return StepMemory(
            state=self._state,
            summed=self._summed if accumulates else 0.0,
            gradient=self._gradient,
            layer_inputs=activations.layer_inputs if self._trains_trunk else 0.0,
            activations=activations.temporaries(self._weights, self._layer_copies)
            + (activations.kept if self._trains_trunk else 0.0),
            update=self._update,
        )
