"""The table of attention kinds. A new kind is one file and one line here, or an import path in a config."""

from composer_jax.extensions import resolve
from composer_jax.models.attention import Attention
from composer_jax.models.config import ModelConfig
from composer_jax.models.gqa import GroupedQueryAttention
from composer_jax.models.mla import MultiHeadLatentAttention

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
