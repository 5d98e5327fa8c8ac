"""The whole network against the NumPy reference, and against itself computed in other ways."""

import jax
import numpy as np
import pytest

from composer_jax.models.model_def import ModelDef
from tests.models import reference
from tests.models.small import WITHOUT_EXPERTS, forward, random_weights, relative_error, rows, small

TOKENS = np.random.default_rng(0).integers(0, 64, 11).tolist()

VARIANTS = {
    "plain": {},
    "query_rank": {"q_lora_rank": 12, "embedding_taps": 0, "n_dense_layers": 0, "n_layers": 2},
    "no_experts": WITHOUT_EXPERTS,
    "experts_in_some_layers": {"n_layers": 6, "n_dense_layers": 0, "dense_layers": (1, 2, 5)},
    "experts_in_every_other_layer": {
        "n_layers": 4,
        "n_dense_layers": 0,
        "dense_layers": (0, 2),
        "tie_embeddings": True,
    },
    "groups": {
        "n_mtp_modules": 3,
        "n_expert_groups": 4,
        "topk_groups": 2,
        "n_shared_experts": 0,
        "attention_scale": 1.5,
    },
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_are_those_of_the_reference(changes):
    """MTP included: equations 21 to 23 of DeepSeek-V3, at every position for which a module has a prediction."""
    config = small(**changes)
    params, bias = random_weights(config)
    out = forward(config)(params, bias, rows([[TOKENS]], 16))
    n = len(TOKENS)
    assert relative_error(out["logits"][0, :n], reference.logits(params, bias, TOKENS, config)) < 1e-5
    modules = reference.mtp_logits(params, bias, TOKENS, config)
    assert len(modules) == len(out["mtp_logits"]) == config.n_mtp_modules > 0
    for k, (actual, expected) in enumerate(zip(out["mtp_logits"], modules, strict=True), start=1):
        assert relative_error(actual[0, : n - k], expected) < 1e-5


def test_only_an_untied_head_has_a_weight():
    tied, untied = (ModelDef(small(tie_embeddings=tie)).shapes()[0] for tie in (True, False))
    assert "head" not in tied
    assert untied["head"].shape == (32, 64)
    assert tied["embedding"]["table"].shape == untied["embedding"]["table"].shape == (64, 32)


@pytest.mark.parametrize(
    "layers",
    [{}, {"n_dense_layers": 0, "dense_layers": (1, 3)}],
    ids=["dense_first", "experts_in_every_other_layer"],
)
def test_unrolling_and_rematerialisation_do_not_change_the_output(layers):
    plain = small(**layers, n_layers=4, n_mtp_modules=0)
    params, bias = random_weights(plain)
    batch = rows([[TOKENS]], 16)

    def loss_and_gradient(config):
        def loss(params):
            decoder = ModelDef(config).bind(params, bias)
            hidden = decoder(batch["tokens"], batch["positions"], batch["segments"])
            return (decoder.logits(hidden.last_BSD)[0, : len(TOKENS)] ** 2).sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    expected = loss_and_gradient(plain)
    # Of the first case: three expert layers, two of them to an iteration, one is left over.
    actual = loss_and_gradient(small(**layers, n_layers=4, n_mtp_modules=0, scan_unroll=2, remat=True))
    assert jax.tree.all(jax.tree.map(lambda f, w: relative_error(f, w) < 1e-5, actual, expected))


def test_bfloat16_computation_stays_near_float32():
    params, bias = random_weights(small())
    batch = rows([[TOKENS]], 16)
    expected = forward(small())(params, bias, batch)["logits"]
    actual = forward(small(compute_dtype="bfloat16"))(params, bias, batch)["logits"]
    assert actual.dtype == np.float32
    # Rounding may change an expert of a token; most tokens agree to a few percent.
    errors = np.abs(actual - expected).max(-1)[0, : len(TOKENS)] / np.abs(expected).max()
    assert 1e-5 < np.median(errors) < 0.05
