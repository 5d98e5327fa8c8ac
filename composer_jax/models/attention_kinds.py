"""The table of attention kinds. A new kind is one file and one line here, or an import path in a config."""

from jax.sharding import Mesh

from composer_jax.extensions import resolve
from composer_jax.models.attention import Attention
from composer_jax.models.config import ModelConfig
from composer_jax.models.gqa import GroupedQueryAttention
from composer_jax.models.mla import MultiHeadLatentAttention
from composer_jax.ops.attention_form import FormChoice, RowShape, choose_form
from composer_jax.ops.local_gpu import local_gpu

ATTENTION_KINDS: dict[str, type[Attention]] = {"mla": MultiHeadLatentAttention, "gqa": GroupedQueryAttention}


def attention_name(config: ModelConfig) -> str:
    """Returns config.attention; where that is None, "mla" if kv_lora_rank is set and "gqa" otherwise."""
    return config.attention or ("gqa" if config.kv_lora_rank is None else "mla")


def attention_kind(config: ModelConfig) -> type[Attention]:
    """Returns the class that config.attention names.

    Raises:
      UserError: the name is neither in ATTENTION_KINDS nor an import path that resolves, or a field of the config is
        set that the kind does not use.
    """
    kind = resolve(attention_name(config), ATTENTION_KINDS, "config.model.attention")
    kind.check_config(config)
    return kind


def attention_form(config: ModelConfig, mesh: Mesh, tokens: int) -> FormChoice:
    """Returns the form that attention has in training programs on a mesh, for rows of this many tokens.

    It is chosen again while a program is traced (ops/packed_attention.py: attend_rows). This function knows the choice
    before that, for every kind: a head of queries is qk_nope_dim + qk_rope_dim wide in all of them.

    Raises:
      UserError: config.attention_form names a form that cannot run there.
    """
    heads, parts = config.n_heads // mesh.shape["tensor"], mesh.shape["context"]
    width = config.qk_nope_dim + config.qk_rope_dim
    heads = min(heads, config.heads_at_once or heads)
    shape = RowShape(config.dtype, tokens // parts, tokens, heads, width, config.v_head_dim, parts == 1)
    return choose_form(config.attention_form, mesh.devices.flat[0].platform, local_gpu(), shape)
