"""ModelConfig refuses values out of range with field, value and way out; extras for tiny models are off by default."""

import dataclasses

import pytest

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.rope import Llama3Rope, Yarn
from tests.models.small import WITHOUT_EXPERTS, small

FIELDS = dataclasses.asdict(small())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"experts_per_token": 9}, ["experts_per_token=9", "n_experts=8"]),
        ({"n_expert_groups": 3}, ["n_experts=8", "n_expert_groups=3"]),
        ({"n_expert_groups": 4, "topk_groups": 5}, ["topk_groups=5", "n_expert_groups=4"]),
        ({"n_expert_groups": 4, "topk_groups": 0}, ["topk_groups=0"]),
        ({"n_expert_groups": 4, "topk_groups": 1}, ["experts_per_token=3", "topk_groups=1", "2 experts"]),
        ({"n_dense_layers": 3}, ["n_dense_layers=3", "n_layers=3", "n_experts=0"]),
        ({"n_experts": 0}, ["expert_ff_dim=5", "n_experts=0", "use 0"]),
        (WITHOUT_EXPERTS | {"n_shared_experts": 1}, ["n_shared_experts=1", "n_experts=0"]),
        (WITHOUT_EXPERTS | {"dense_layers": (1,)}, ["dense_layers=(1,)", "n_experts=0", "use None"]),
        (WITHOUT_EXPERTS | {"n_dense_layers": 2}, ["n_dense_layers=2", "n_experts=0", "n_layers=3"]),
        (WITHOUT_EXPERTS | {"dense_ff_dim": 0}, ["dense_ff_dim=0", "n_experts=0"]),
        ({"n_experts": -1}, ["n_experts=-1", "at least 0"]),
        ({"expert_ff_dim": 0}, ["expert_ff_dim=0", "n_experts=8"]),
        ({"experts_per_token": 0}, ["experts_per_token=0", "n_experts=8"]),
        ({"dense_layers": (1,)}, ["n_dense_layers=1", "dense_layers=(1,)", "both"]),
        ({"n_dense_layers": 0, "dense_layers": (3,)}, ["dense_layers=(3,)", "from 0 to 2"]),
        ({"n_dense_layers": 0, "dense_layers": (2, 1)}, ["dense_layers=(2, 1)", "ascending"]),
        ({"n_dense_layers": 0, "dense_layers": 1}, ["dense_layers=1", "ascending"]),
        ({"n_dense_layers": 0, "dense_layers": (0, 1, 2)}, ["dense_layers=(0, 1, 2)", "n_layers=3", "n_experts=0"]),
        ({"n_dense_layers": 0, "dense_layers": (0, 1)}, ["dense_layers=(0, 1)", "n_dense_layers=2"]),
        ({"n_dense_layers": 0, "dense_layers": ()}, ["dense_layers=()", "n_dense_layers=0"]),
        ({"n_dense_layers": 0, "dense_layers": (1,), "dense_ff_dim": 0}, ["dense_ff_dim=0", "dense_layers=(1,)"]),
        ({"yarn": Yarn(2.0), "llama3_rope": Llama3Rope(2.0)}, ["yarn and llama3_rope", "None"]),
        ({"qk_rope_dim": 5}, ["qk_rope_dim=5", "even"]),
        ({"dispatch": "fastest"}, ["dispatch='fastest'", "dense", "ring", "ragged_all_to_all"]),
        ({"capacity_factor": 0.0}, ["capacity_factor=0.0", "greater than 0"]),
        ({"n_mtp_modules": -1}, ["n_mtp_modules=-1", "at least 0"]),
        ({"head_chunk": 0}, ["head_chunk=0", "at least 1"]),
        ({"expert_chunk": -4}, ["expert_chunk=-4", "at least 1"]),
        ({"capacity_factor": float("inf")}, ["capacity_factor=inf"]),
        ({"init": "zeros"}, ["init='zeros'", "normal", "package.module:function"]),
        ({"router_scores": "linear"}, ["router_scores='linear'", "softmax"]),
        ({"sliding_window": 4}, ["sliding_window=4", "full_attention_every=1"]),
        ({"sliding_window": 0, "full_attention_every": 2}, ["sliding_window=0"]),
        ({"full_attention_every": 0}, ["full_attention_every=0"]),
        ({"d_model": "32"}, ["d_model='32'", "whole number"]),
        ({"n_layers": True}, ["n_layers=True", "whole number"]),
        ({"max_context": 0}, ["max_context=0", "at least 1"]),
        ({"norm_eps": 0.0}, ["norm_eps=0.0", "greater than 0"]),
        ({"rope_theta": float("nan")}, ["rope_theta=nan"]),
        ({"compute_dtype": "int8"}, ["compute_dtype='int8'", "bfloat16"]),
        ({"cache_dtype": "fp8"}, ["cache_dtype='fp8'", "int8"]),
        ({"precision": "fp8"}, ["precision='fp8'", "none, mxfp8, nvfp4"]),
        ({"expert_qat": "int8"}, ["expert_qat='int8'", "none, int4"]),
        ({"precision": "mxfp8", "expert_qat": "int4"}, ["precision='mxfp8'", "expert_qat='int4'"]),
        ({"precision": "nvfp4", "heads_at_once": 1}, ["heads_at_once=1", "precision='nvfp4'"]),
        ({"dense_ff_dim": 0}, ["dense_ff_dim=0", "n_dense_layers=1"]),
        ({"remat_saves": ("scores",)}, ["scores", "latents"]),
        ({"qk_nope_dim": -2}, ["qk_nope_dim=-2", "at least 0"]),
        ({"kv_lora_rank": None, "n_kv_heads": 0}, ["n_kv_heads=0"]),
        ({"full_attention_every": 2}, ["sliding_window=None", "full_attention_every=2"]),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_with_field_and_value(changes, named):
    with pytest.raises(UserError) as error:
        small(**changes)
    for text in named:
        assert text in str(error.value)


def test_unknown_and_missing_fields_are_named():
    assert ModelConfig.from_dict(FIELDS) == small()
    with pytest.raises(UserError, match="'n_head'.*n_heads"):
        ModelConfig.from_dict(FIELDS | {"n_head": 2})
    with pytest.raises(UserError, match="lacks d_model, v_head_dim"):
        ModelConfig.from_dict({k: v for k, v in FIELDS.items() if k not in ("d_model", "v_head_dim")})


def test_extras_for_tiny_models_are_off_by_default():
    required = {f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING}
    plain = ModelConfig(**{name: FIELDS[name] for name in required}, kv_lora_rank=16, dense_ff_dim=24)
    assert (plain.n_experts, plain.n_moe_layers) == (0, 0)
    assert (plain.embedding_taps, plain.attention_scale, plain.init) == (0, 1.0, "normal")
    assert not plain.tie_embeddings


def test_derived_numbers():
    config = small()
    assert config.n_moe_layers == 2
    assert [config.is_dense(layer) for layer in range(3)] == [True, False, False]
    some = small(n_dense_layers=0, dense_layers=(1,))
    assert (some.n_moe_layers, [some.is_dense(layer) for layer in range(3)]) == (2, [False, True, False])
    assert ModelConfig.from_dict(dataclasses.asdict(some) | {"dense_layers": [1]}) == some


def test_a_network_without_experts_has_one_config():
    """However its layers are counted, and after a change of their number."""
    counted = small(**WITHOUT_EXPERTS | {"n_dense_layers": 3})
    assert counted == small(**WITHOUT_EXPERTS)
    assert counted.n_moe_layers == 0 and all(map(counted.is_dense, range(3)))
    assert dataclasses.replace(counted, n_layers=5) == small(**WITHOUT_EXPERTS, n_layers=5)


def test_dtype():
    config = small()
    assert config.dtype == "float32"
