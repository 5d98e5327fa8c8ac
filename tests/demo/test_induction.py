"""A network with the induction initialiser copies before training."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.demo.induction import orthogonal
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from tests.models.small import forward, rows, small


def second_copy_nll(config, weights, length=20) -> tuple[float, float]:
    """Mean -log p of the tokens of a random sequence and of its second copy, nats."""
    rng = np.random.default_rng(0)
    sequences = [rng.permutation(config.vocab_size)[:length].tolist() for _ in range(8)]
    batch = rows([[s + s] for s in sequences], 2 * length)
    logits = np.asarray(forward(config)(*weights, batch)["logits"], np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(logprobs[:, :-1], batch["tokens"][:, 1:, None], axis=-1)[..., 0]
    # The first tokens of the copy have too short a past to be found again.
    return float(nll[:, : length - 1].mean()), float(nll[:, length + 2 :].mean())


CONFIG = small(
    d_model=64,
    n_layers=2,
    n_heads=4,
    kv_lora_rank=48,
    qk_nope_dim=32,
    v_head_dim=32,
    embedding_taps=3,
    tie_embeddings=True,
    n_mtp_modules=0,
    init="composer_jax.demo.induction:apply_induction",
)


@pytest.fixture(scope="module")
def induced():
    return ModelDef(CONFIG).init(0)


@pytest.fixture(scope="module")
def plain():
    return ModelDef(dataclasses.replace(CONFIG, init="normal")).init(0)


def test_a_fresh_model_already_copies_and_a_plain_one_does_not(induced, plain):
    first, second = second_copy_nll(CONFIG, induced)
    assert second < first - 2
    first, second = second_copy_nll(CONFIG, plain)
    assert second > first - 0.5


def test_only_half_of_the_heads_and_the_taps_are_set(induced, plain):
    for name in ("dense_layers", "moe_layers"):
        q, other = induced[0][name]["attention"]["q"], plain[0][name]["attention"]["q"]
        np.testing.assert_array_equal(q[:, :, 2:], other[:, :, 2:])
        assert not np.any(np.all(q[:, :, :2] == other[:, :, :2], axis=(1, 3)))
        assert jnp.abs(q[:, :, :2, 32:]).max() == 0  # a copying head does not look at positions
    np.testing.assert_array_equal(induced[0]["embedding"]["table"], plain[0]["embedding"]["table"])
    shift = np.asarray(induced[0]["embedding"]["taps"][0])
    np.testing.assert_allclose(shift @ shift.T, np.eye(64), atol=1e-5)
    np.testing.assert_allclose(induced[0]["embedding"]["taps"][1], shift @ shift, atol=1e-5)


@pytest.mark.parametrize("changes", [{"q_lora_rank": 8}, {"kv_lora_rank": None, "n_kv_heads": 2}], ids=str)
def test_a_network_without_the_projections_it_sets_is_refused(changes):
    (field, value), *_ = changes.items()
    with pytest.raises(UserError, match=f"{field}={value}.*use init='normal'"):
        ModelDef(dataclasses.replace(CONFIG, **changes)).init(0)


# Two replicas, as in the demo, and several independent stacks of matrices, as in its layers.
TWO_REPLICAS = """
import jax
from jax.sharding import NamedSharding, PartitionSpec
from composer_jax.demo.induction import orthogonal

jax.config.update("jax_num_cpu_devices", 2)
replicated = NamedSharding(jax.make_mesh((2,), ("replica",)), PartitionSpec())
keys = jax.device_put(jax.random.split(jax.random.key(0), (6, 3)), replicated)
make = jax.jit(lambda keys: [jax.vmap(lambda key: orthogonal(key, 64, 64))(keys[i]) for i in range(6)])
for _ in range(50):
    jax.block_until_ready(make(keys))
"""


@pytest.mark.parametrize("threads", ["2", "4"])
def test_orthogonal_matrices_of_two_replicas_do_not_fill_the_pool_of_threads(threads):
    env = os.environ | {"NPROC": threads}
    subprocess.run([sys.executable, "-c", TWO_REPLICAS], env=env, timeout=120, check=True)


def test_matrices_one_at_a_time_have_the_bits_of_a_stack():
    keys = jax.random.split(jax.random.key(0), 3)
    stack = jax.vmap(lambda key: jnp.linalg.qr(jax.random.normal(key, (16, 16)))[0])(keys)
    np.testing.assert_array_equal(jax.vmap(lambda key: orthogonal(key, 16, 8))(keys), stack[:, :, :8])
