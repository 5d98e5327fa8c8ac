"""The tensors of a Hugging Face checkpoint: their names and layouts, and the leaves of our Params that they hold.

One table, `tensor_layouts`, says for every tensor which slices of which of our leaves it holds; reading and writing
both follow it. Names and layouts are those of transformers (families.py lists the architectures). A torch Linear is
stored [out, in], our matrices are [in, out]; our layers are stacked.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from composer_jax.checkpoint.huggingface.families import find_family
from composer_jax.models.attention_kinds import attention_name
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef, Params


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """The layout of one tensor of a checkpoint, and the slices of our leaves that it holds."""

    dims: tuple[str, ...]
    """Its dimensions; several letters are one dimension of their product (`hx`: heads times head width)."""
    order: str
    """The same letters in the order of our leaves."""
    leaves: tuple[str, ...]
    """Dotted paths of the leaves; several are concatenated along the last letter of `order`, or `interleaved`."""
    widths: tuple[int, ...]
    """Size of each leaf along the last letter."""
    index: tuple[int, ...]
    """Leading indices into the leaves: (), (layer,) or (layer, expert)."""
    sizes: Mapping[str, int]
    """Size of each letter."""
    interleaved: bool = False
    """Whether the leaves are stacked along the last letter of `order`, which they do not have themselves."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[letter] for letter in dim) for dim in self.dims)

    def slice_leaf(self, array: np.ndarray, leaf: str) -> np.ndarray:
        """Returns the slice of a leaf that the tensor `array` holds, in the leaf's order; a view if possible."""
        letters = "".join(self.dims)
        array = array.reshape([self.sizes[letter] for letter in letters])
        array = array.transpose([letters.index(letter) for letter in self.order])
        index = self.leaves.index(leaf)
        if self.interleaved:
            return array[..., index]
        start = sum(self.widths[:index])
        return array[..., start : start + self.widths[index]]

    def join_leaves(self, leaves: Mapping[str, Any]) -> np.ndarray:
        """Returns the tensor in the checkpoint's layout, a contiguous copy, from NumPy or JAX leaves."""
        parts = [np.asarray(leaves[leaf][self.index]) for leaf in self.leaves]
        array = parts[0] if len(parts) == 1 else (np.stack if self.interleaved else np.concatenate)(parts, axis=-1)
        array = array.transpose([self.order.index(letter) for letter in "".join(self.dims)])
        copy = np.empty(array.shape, array.dtype)
        copy_into(copy, array)
        return copy.reshape(self.shape)


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """Copies source into target[...].

    Values of equal dtype are copied as integers, which NumPy does far faster than bfloat16 and without the GIL.
    """
    if target.dtype == source.dtype and target.dtype.itemsize in (1, 2, 4, 8):
        integers = np.dtype(f"u{target.dtype.itemsize}")
        target, source = target.view(integers), source.view(integers)
    target[...] = source


def tensor_layouts(config: ModelConfig, *, fused_experts: bool = False) -> dict[str, TensorLayout]:
    """Returns the layout of every tensor of a checkpoint of this network, by name.

    Published files hold one tensor per expert. `fused_experts` selects the form of transformers' `state_dict()` (since
    version 5): the experts of a layer stacked, and gate and up in one tensor.

    Raises:
      UserError: no checkpoint format can store a part of the network.
    """
    find_family(config)
    c = config
    sizes, ours = _letter_sizes(c), leaf_shapes(c)
    table: dict[str, TensorLayout] = {}

    def add(name: str, spec: str, *leaves: str, index: tuple[int, ...] = ()) -> None:
        dims, order = spec.split(" -> ")
        order = order.replace(" ", "")
        widths = tuple(ours[leaf].shape[-1] for leaf in leaves)
        table[name] = TensorLayout(
            tuple(dims.split()), order, leaves, widths, index, sizes, interleaved=order[-1] == "t"
        )

    def add_block(layer: int, stack: str, row: int, *, dense: bool) -> None:
        feed_forward = _feed_forward("mlp", "feed_forward", "f") if dense else _experts(config, fused_experts)
        attention = _ATTENTION[attention_name(config)](config)
        for name, spec, leaves, expert in [*_NORMS, *attention, *feed_forward]:
            add(f"model.layers.{layer}.{name}", spec, *(f"{stack}.{leaf}" for leaf in leaves), index=(row, *expert))

    add("model.embed_tokens.weight", "w d -> w d", "embedding.table")
    rows = {True: 0, False: 0}  # in the stack of dense layers, and in that of expert layers
    for layer in range(c.n_layers):
        dense = c.is_dense(layer)
        add_block(layer, "dense_layers" if dense else "moe_layers", rows[dense], dense=dense)
        rows[dense] += 1
    for row in range(c.n_mtp_modules):
        layer = c.n_layers + row
        for name, leaf in _MTP_NORMS.items():
            add(f"model.layers.{layer}.{name}.weight", "d -> d", f"mtp.{leaf}.scale", index=(row,))
        add(f"model.layers.{layer}.eh_proj.weight", "d b -> b d", "mtp.projection", index=(row,))
        add_block(layer, "mtp.block", row, dense=False)
    add("model.norm.weight", "d -> d", "final_norm.scale")
    if not c.tie_embeddings:
        add("lm_head.weight", "w d -> d w", "head")
    return table


def _letter_sizes(c: ModelConfig) -> dict[str, int]:
    """Returns the size of each letter of the layouts below."""
    return {
        "w": c.vocab_size,
        "d": c.d_model,
        "b": 2 * c.d_model,  # an embedding and a state
        "h": c.n_heads,
        "n": c.n_kv_heads or 0,
        "q": c.q_lora_rank or 0,
        "x": c.qk_nope_dim + c.qk_rope_dim,  # a query head
        "r": c.kv_lora_rank or 0,
        "m": (c.kv_lora_rank or 0) + c.qk_rope_dim,  # the latent and the rotary key
        "y": c.qk_nope_dim + c.v_head_dim,  # a key head without position, and a value head
        "v": c.v_head_dim,
        "f": c.dense_ff_dim,
        "e": c.n_experts,
        "g": c.expert_ff_dim,
        "z": 2 * c.expert_ff_dim,  # gate and up
        "t": 2,  # gate, up
        "s": c.n_shared_experts * c.expert_ff_dim,
    }


_MTP_NORMS = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "shared_head.norm": "final_norm"}


def duplicate_tensors(config: ModelConfig) -> dict[str, str]:
    """Returns name -> original of the copies of embedding and head in every MTP module, which shares them."""
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    modules = [f"model.layers.{config.n_layers + row}" for row in range(config.n_mtp_modules)]
    embeddings = {f"{module}.embed_tokens.weight": "model.embed_tokens.weight" for module in modules}
    return embeddings | {f"{module}.shared_head.head.weight": head for module in modules}


def absent_leaves(config: ModelConfig, table: Mapping[str, TensorLayout]) -> list[str]:
    """Returns the leaves that the checkpoint does not store and that are zero: the router bias of load balancing, in
    families without it."""
    stored = {leaf for tensor in table.values() for leaf in tensor.leaves}
    return [leaf for leaf in leaf_shapes(config) if leaf not in stored]


def leaf_shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns every leaf of (params, router_bias) by its dotted path."""
    params, bias = ModelDef(config).shapes()
    return flatten_tree(params) | flatten_tree(bias)


def flatten_tree(tree: Params) -> dict[str, Any]:
    """Returns the leaves of a nested dict by their dotted paths."""
    return dict(flatten_dict(tree, sep="."))


_Row = tuple[str, str, tuple[str, ...], tuple[int, ...]]
"""One tensor of a layer: its name, its layout, our leaves, and () or (expert,)."""


_NORMS: list[_Row] = [
    ("input_layernorm.weight", "d -> d", ("attention_norm.scale",), ()),
    ("post_attention_layernorm.weight", "d -> d", ("feed_forward_norm.scale",), ()),
]


def _latent_attention(config: ModelConfig) -> Iterator[_Row]:
    if config.q_lora_rank is None:
        yield "self_attn.q_proj.weight", "hx d -> d h x", ("attention.q",), ()
    else:
        yield "self_attn.q_a_proj.weight", "q d -> d q", ("attention.q_down",), ()
        yield "self_attn.q_a_layernorm.weight", "q -> q", ("attention.q_norm.scale",), ()
        yield "self_attn.q_b_proj.weight", "hx q -> q h x", ("attention.q",), ()
    yield "self_attn.kv_a_proj_with_mqa.weight", "m d -> d m", ("attention.kv_down",), ()
    yield "self_attn.kv_a_layernorm.weight", "r -> r", ("attention.kv_norm.scale",), ()
    yield "self_attn.kv_b_proj.weight", "hy r -> r h y", ("attention.k_up", "attention.v_up"), ()
    yield "self_attn.o_proj.weight", "d hv -> h v d", ("attention.out",), ()


def _grouped_attention(config: ModelConfig) -> Iterator[_Row]:
    for letter, heads, width in (("q", "h", "x"), ("k", "n", "x"), ("v", "n", "v")):
        yield f"self_attn.{letter}_proj.weight", f"{heads}{width} d -> d {heads} {width}", (f"attention.{letter}",), ()
        if config.qkv_bias:
            spec = f"{heads}{width} -> {heads} {width}"
            yield f"self_attn.{letter}_proj.bias", spec, (f"attention.{letter}_bias",), ()
    yield "self_attn.o_proj.weight", "d hv -> h v d", ("attention.out",), ()
    if config.out_bias:
        yield "self_attn.o_proj.bias", "d -> d", ("attention.out_bias",), ()
    if config.qk_norm:
        for letter in "qk":
            yield f"self_attn.{letter}_norm.weight", "x -> x", (f"attention.{letter}_norm.scale",), ()
    if config.attention_sinks:
        yield "self_attn.sinks", "h -> h", ("attention.sinks",), ()


_ATTENTION = {"mla": _latent_attention, "gqa": _grouped_attention}


def _experts(config: ModelConfig, fused: bool) -> Iterator[_Row]:
    if config.expert_bias:  # gpt-oss
        gate_and_up = lambda kind: tuple(f"feed_forward.{name}{kind}" for name in ("gate", "up"))  # noqa: E731
        yield "mlp.router.weight", "e d -> d e", ("feed_forward.router.weight",), ()
        yield "mlp.router.bias", "e -> e", ("feed_forward.router.logit_bias",), ()
        yield "mlp.experts.gate_up_proj", "e d gt -> e d g t", gate_and_up(""), ()
        yield "mlp.experts.gate_up_proj_bias", "e gt -> e g t", gate_and_up("_bias"), ()
        yield "mlp.experts.down_proj", "e g d -> e g d", ("feed_forward.down",), ()
        yield "mlp.experts.down_proj_bias", "e d -> e d", ("feed_forward.down_bias",), ()
        return
    yield "mlp.gate.weight", "e d -> d e", ("feed_forward.router.weight",), ()
    if config.router_scores == "sigmoid":
        yield "mlp.gate.e_score_correction_bias", "e -> e", ("feed_forward.router.bias",), ()
    if fused:
        yield "mlp.experts.gate_up_proj", "e z d -> e d z", ("feed_forward.gate", "feed_forward.up"), ()
        yield "mlp.experts.down_proj", "e d g -> e g d", ("feed_forward.down",), ()
    else:
        for expert in range(config.n_experts):
            yield from _feed_forward(f"mlp.experts.{expert}", "feed_forward", "g", expert)
    if config.n_shared_experts:
        yield from _feed_forward("mlp.shared_experts", "feed_forward.shared", "s")


def _feed_forward(theirs: str, ours: str, width: str, *expert: int) -> Iterator[_Row]:
    yield f"{theirs}.gate_proj.weight", f"{width} d -> d {width}", (f"{ours}.gate",), expert
    yield f"{theirs}.up_proj.weight", f"{width} d -> d {width}", (f"{ours}.up",), expert
    yield f"{theirs}.down_proj.weight", f"d {width} -> {width} d", (f"{ours}.down",), expert
