"""Networks in bfloat16 on GPUs that have none."""

import dataclasses

import pytest

from composer_jax.models import supported_dtype
from composer_jax.models.supported_dtype import supported_network
from composer_jax.ops.local_gpu import LocalGpu
from tests.models.small import small

NETWORK = dataclasses.replace(small(), param_dtype="bfloat16", compute_dtype="bfloat16")


@pytest.fixture
def on(monkeypatch):
    """Puts a GPU, or None, in the place of this machine's."""
    supported_dtype._warn.cache_clear()
    yield lambda gpu: monkeypatch.setattr(supported_dtype, "local_gpu", lambda: gpu)
    supported_dtype._warn.cache_clear()


@pytest.mark.parametrize("gpu", [LocalGpu("Tesla T4", (7, 5), 91002), LocalGpu("Tesla V100-SXM2-16GB", (7, 0), 91002)])
def test_a_card_without_bfloat16_computes_in_float32_and_says_so_once(on, gpu, caplog):
    on(gpu)
    network = supported_network(NETWORK)
    assert network == supported_network(NETWORK) == dataclasses.replace(NETWORK, compute_dtype="float32")
    (sentence,) = (record.getMessage() for record in caplog.records)
    assert f"{gpu.kind} (compute capability 7." in sentence and "model.compute_dtype='bfloat16'" in sentence


@pytest.mark.parametrize(
    "gpu", [LocalGpu("NVIDIA A100-SXM4-40GB", (8, 0), 91002), LocalGpu("of 2030", (13, 0), 0), None]
)
def test_other_devices_compute_as_the_config_says(on, gpu, caplog):
    on(gpu)
    assert supported_network(NETWORK) is NETWORK
    on(LocalGpu("Tesla T4", (7, 5), 91002))
    for dtype in ("float32", "float16"):
        network = dataclasses.replace(NETWORK, compute_dtype=dtype)
        assert supported_network(network) is network
    assert not caplog.records
