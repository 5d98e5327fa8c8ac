"""SamplerConfig refuses numbers out of range by the name of their field."""

import pytest

from composer_jax.errors import UserError
from composer_jax.sampler.config import SamplerConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": 0}, "sampler.slots=0 is too small"),
        ({"decode_steps": 0}, "sampler.decode_steps=0 is too small"),
        ({"max_model_len": 1}, "sampler.max_model_len=1 holds no answer"),
        ({"prefill_shapes": ()}, "sampler.prefill_shapes is empty"),
        ({"prefill_shapes": ((0, 8),)}, r"sampler.prefill_shapes has \(0, 8\)"),
        ({"prefill_shapes": ((4, 128), (16, 32))}, r"rows of \[128, 32\] tokens; give the shapes by ascending tokens"),
        ({"stall_seconds": -1.0}, "sampler.stall_seconds=-1.0 is negative"),
        ({"decode_rows": (8, 0)}, r"sampler.decode_rows=\(8, 0\) has a number below 1"),
        (
            {"param_dtype": "int4"},
            "sampler.param_dtype='int4' is unknown; use one of float32, bfloat16, int8, float8_e4m3fn",
        ),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_its_name(fields, message):
    with pytest.raises(UserError, match=message):
        SamplerConfig(**fields)
