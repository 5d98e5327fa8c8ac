"""Weights in the form Hugging Face checkpoints have: their tensor names and layouts there, our Params here.

One table, `layout`, says for every tensor of a DeepSeek-V3-shaped checkpoint (DeepSeek-V3, Kimi K2, Moonlight) which
slices of which of our leaves it holds; reading and writing both follow it. Names and layouts are those of transformers'
`DeepseekV3ForCausalLM`. A torch Linear is stored [out, in], our matrices are [in, out]; our layers are stacked.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.definition import Definition, Params
from composer_jax.models.rope import Yarn

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
"""Values of config.json's model_type that name this architecture."""

_SHOWN = 4  # names listed in one error


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: its layout there, and which slices of our leaves it holds."""

    dims: tuple[str, ...]
    """Its dimensions; several letters are one dimension that is the product of those (`hx`: heads times head width)."""
    order: str
    """The same letters in the order of our leaves."""
    leaves: tuple[str, ...]
    """Dotted paths of the leaves; several lie side by side along the last letter of `order`."""
    index: tuple[int, ...]
    """Leading indices into the leaves: (), (layer,) or (layer, expert)."""
    sizes: Mapping[str, int]
    """Size of each letter."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[letter] for letter in dim) for dim in self.dims)

    def read(self, array: np.ndarray, leaves: Mapping[str, np.ndarray]) -> None:
        """Writes the tensor's values into its slices of `leaves`."""
        letters = "".join(self.dims)
        array = array.reshape([self.sizes[letter] for letter in letters])
        array = array.transpose([letters.index(letter) for letter in self.order])
        start = 0
        for leaf in self.leaves:
            target = leaves[leaf][self.index]
            target[...] = array[..., start : start + target.shape[-1]]
            start += target.shape[-1]

    def write(self, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
        """The tensor as the checkpoint has it, a contiguous copy."""
        parts = [leaves[leaf][self.index] for leaf in self.leaves]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        array = array.transpose([self.order.index(letter) for letter in "".join(self.dims)])
        return np.array(array, order="C").reshape(self.shape)


def layout(config: ModelConfig, *, fused_experts: bool = False) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of this network, by name.

    Published files hold one tensor per expert; `fused_experts` gives the form that transformers (since 5) holds in
    memory and that `state_dict()` returns, with the experts of a layer stacked and gate and up in one tensor.

    Raises:
      UserError: the network has a part that such a checkpoint has no place for.
    """
    _require_expressible(config)
    c = config
    sizes = {
        "w": c.vocab_size,
        "d": c.d_model,
        "h": c.n_heads,
        "q": c.q_lora_rank or 0,
        "x": c.qk_nope_dim + c.qk_rope_dim,  # a query head
        "r": c.kv_lora_rank,
        "m": c.latent_dim,  # the latent and the rotary key
        "y": c.qk_nope_dim + c.v_head_dim,  # a key head without position, and a value head
        "v": c.v_head_dim,
        "f": c.dense_ff_dim,
        "e": c.n_experts,
        "g": c.expert_ff_dim,
        "z": 2 * c.expert_ff_dim,  # gate and up
        "s": c.n_shared_experts * c.expert_ff_dim,
    }
    table: dict[str, Tensor] = {}

    def add(name: str, spec: str, *leaves: str, index: tuple[int, ...] = ()) -> None:
        dims, order = spec.split(" -> ")
        table[name] = Tensor(tuple(dims.split()), order.replace(" ", ""), leaves, index, sizes)

    add("model.embed_tokens.weight", "w d -> w d", "embedding.table")
    for layer in range(c.n_layers):
        dense = layer < c.n_dense_layers
        stack, row = ("dense_layers", layer) if dense else ("moe_layers", layer - c.n_dense_layers)
        feed_forward = _feed_forward("mlp", "feed_forward", "f") if dense else _experts(config, fused_experts)
        for name, spec, leaves, expert in [*_attention(config), *feed_forward]:
            add(f"model.layers.{layer}.{name}", spec, *(f"{stack}.{leaf}" for leaf in leaves), index=(row, *expert))
    add("model.norm.weight", "d -> d", "final_norm.scale")
    if not c.tie_embeddings:
        add("lm_head.weight", "w d -> d w", "head")
    return table


_Row = tuple[str, str, tuple[str, ...], tuple[int, ...]]
"""Of one layer: name there, layout, our leaves, () or (expert,)."""


def _attention(config: ModelConfig) -> Iterator[_Row]:
    yield "input_layernorm.weight", "d -> d", ("attention_norm.scale",), ()
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
    yield "post_attention_layernorm.weight", "d -> d", ("feed_forward_norm.scale",), ()


def _experts(config: ModelConfig, fused: bool) -> Iterator[_Row]:
    yield "mlp.gate.weight", "e d -> d e", ("feed_forward.router.weight",), ()
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


def from_deepseek_v3(state: Mapping[str, np.ndarray], config: ModelConfig) -> tuple[Params, Params]:
    """(params, router_bias) as NumPy arrays from the tensors of a checkpoint.

    Args:
      state: name -> array of any float type of two bytes or more, per expert or fused (see `layout`). Values are cast
        to `config.param_dtype`, the router's bias to float32.

    Raises:
      UserError: names the tensors that are missing, unexpected, of another shape or quantised.
    """
    state = {name: array for name, array in state.items() if not _carries_nothing(name, array)}
    head = state.pop("lm_head.weight", None) if config.tie_embeddings else None
    fused = any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    table = layout(config, fused_experts=fused)
    _require_shapes("The checkpoint", state, {name: tensor.shape for name, tensor in table.items()})
    for name, array in state.items():
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
            raise UserError(
                f"{name} is {array.dtype}; quantised checkpoints cannot be read yet, convert it to bfloat16."
            )
    if head is not None and not np.array_equal(head, state["model.embed_tokens.weight"]):
        raise UserError(
            "lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings is true; set it to false."
        )

    shapes = [flatten_dict(tree, sep=".") for tree in Definition(config).shapes()]
    params, bias = ({path: np.empty(leaf.shape, leaf.dtype) for path, leaf in tree.items()} for tree in shapes)
    leaves = params | bias
    for name, tensor in table.items():
        tensor.read(state[name], leaves)
    return unflatten_dict(params, sep="."), unflatten_dict(bias, sep=".")


def to_deepseek_v3(params: Params, router_bias: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint in the published form (one per expert); dtypes stay, every bit is kept.

    Raises:
      UserError: the arrays are not those of `config`, or the network has a part that a checkpoint has no place for.
    """
    table = layout(config)
    leaves = flatten_dict(params, sep=".") | flatten_dict(router_bias, sep=".")
    shapes = [flatten_dict(tree, sep=".") for tree in Definition(config).shapes()]
    _require_shapes("The network", leaves, {path: leaf.shape for tree in shapes for path, leaf in tree.items()})
    leaves = {path: np.asarray(leaf) for path, leaf in leaves.items()}
    return {name: tensor.write(leaves) for name, tensor in table.items()}


def _carries_nothing(name: str, array: np.ndarray) -> bool:
    """Rotary frequencies, which some files store though they follow from the config, and the empty matrices that
    transformers has in place of no shared experts."""
    return name.endswith("rotary_emb.inv_freq") or array.size == 0


def _require_shapes(owner: str, found: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]]) -> None:
    def listed(names: list[str]) -> str:
        rest = len(names) - _SHOWN
        return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")

    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    wrong = [
        f"{name} as {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    complaints = {"lacks": missing, "has, unexpected,": extra, "has": wrong}
    problems = [f"{verb} {listed(names)}" for verb, names in complaints.items() if names]
    if problems:
        raise UserError(f"{owner} {'; '.join(problems)}; do the weights and the configuration belong together?")


def _require_expressible(config: ModelConfig) -> None:
    """Refuses what transformers' DeepseekV3ForCausalLM does not have, or has and we do not write yet."""
    for field, neutral in (
        ("embedding_taps", 0),
        ("attention_scale", 1.0),
        ("n_mtp_modules", 0),
        ("latent_norm_eps", 1e-6),
    ):
        value = getattr(config, field)
        if value != neutral:
            raise UserError(f"{field}={value} has no place in a DeepSeek-V3 checkpoint yet; only {neutral} has.")


# ------------------------------------------------------------------------------------------------------- config.json

_FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_dense_layers": "first_k_dense_replace",
    "n_heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_dim": "qk_nope_head_dim",
    "qk_rope_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "dense_ff_dim": "intermediate_size",
    "expert_ff_dim": "moe_intermediate_size",
    "n_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "q_lora_rank": "q_lora_rank",
    "routed_scaling_factor": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "max_context": "max_position_embeddings",
}
"""Our field -> the key that config.json must have."""

_ONLY = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_interleave": True,
    "num_nextn_predict_layers": 0,
    "quantization_config": None,
}
"""Keys of which one value is built; a config.json without the key means that value."""


def model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a checkpoint from its config.json. How it is computed (dtypes, dispatch) keeps our defaults.

    Raises:
      UserError: another architecture, a missing key, or a feature that the Decoder does not have yet.
    """
    kind = hf_config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UserError(f"model_type={kind!r} in config.json cannot be read; these can: {', '.join(MODEL_TYPES)}.")
    missing = [key for key in _FIELDS.values() if key not in hf_config]
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}.")
    only = _ONLY | {"num_key_value_heads": hf_config["num_attention_heads"]}
    for key, value in only.items():
        found = hf_config.get(key, value)
        null_means_value = not value or key == "num_key_value_heads"
        if found != value and not (found is None and null_means_value):
            raise UserError(f"config.json has {key}={found!r}; only {value!r} can be read yet.")
    theta, yarn = _rotary(hf_config)
    return ModelConfig(
        **{ours: hf_config[theirs] for ours, theirs in _FIELDS.items()},
        n_shared_experts=hf_config.get("n_shared_experts") or 0,
        n_expert_groups=hf_config.get("n_group") or 1,
        topk_groups=hf_config.get("topk_group") or 1,
        rope_theta=theta,
        yarn=yarn,
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
    )


def _rotary(hf_config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """(theta, YaRN): in rope_parameters since transformers 5; before, theta at the top and YaRN in rope_scaling."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", hf_config.get("rope_theta"))
    if theta is None:
        raise UserError("config.json lacks rope_theta.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "yarn":
        raise UserError(f"config.json scales positions by {kind!r}; only 'yarn' and 'default' can be read yet.")
    if rope.get("attention_factor") is not None:
        raise UserError(f"config.json has attention_factor={rope['attention_factor']!r}; only null can be read yet.")
    if "factor" not in rope:
        raise UserError("config.json scales positions by 'yarn' and lacks its factor.")
    mscale, mscale_all_dim = (rope.get(key) or 0.0 for key in ("mscale", "mscale_all_dim"))
    if bool(mscale) != bool(mscale_all_dim):
        raise UserError(
            f"config.json has mscale={mscale!r} and mscale_all_dim={mscale_all_dim!r}; both or none can be read yet."
        )
    return float(theta), Yarn(
        factor=float(rope["factor"]),
        original_context=rope.get("original_max_position_embeddings") or hf_config["max_position_embeddings"],
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        mscale=float(mscale or 1.0),
        mscale_all_dim=float(mscale_all_dim),
        truncate=rope.get("truncate", True),
    )
