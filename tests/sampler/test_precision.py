"""The sampler rounds what the learner rounds: its log-probabilities are those of the network over whole rows."""

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.request import Request
from composer_jax.sampler.rollout_weights import rollout_model_def
from tests.models.small import forward, random_weights, rows, small
from tests.sampler.conversations import sample_requests

WIDE = dict(vocab_size=24, n_layers=2, d_model=64, expert_ff_dim=32, dense_ff_dim=64, n_mtp_modules=0)


SLOW = [pytest.param({"precision": name}, marks=pytest.mark.slow) for name in ("mxfp8", "nvfp4")]


@pytest.mark.parametrize("fields", [{"expert_qat": "int4"}, *SLOW], ids=str)
def test_log_probabilities_are_the_networks(new_sampler, fields):
    config = small(**WIDE, **fields)
    weights = random_weights(config)
    sampler = new_sampler(model=config, weights=weights, prefill_shapes=((4, 8),))
    contexts = [np.random.default_rng(4).integers(1, 24, n).tolist() for n in (3, 11)]
    params = SamplingParams(6, prompt_logprobs=True)
    samples = sample_requests(sampler, [Request(c, params, i) for i, c in enumerate(contexts)])
    errors, effects = [], []
    for context, sample in zip(contexts, samples, strict=True):
        tokens = context + sample.tokens
        for model, kept in ((config, errors), (small(**WIDE), effects)):
            logits = np.asarray(forward(model)(*weights, rows([[tokens]], 32))["logits"][0, : len(tokens)], np.float64)
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            expected = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
            kept.extend(np.abs([*sample.prompt.logprobs[1:], *sample.logprobs] - expected))
    # A number on the edge between two roundings can fall to either side of it: a few tokens may differ by more.
    assert np.median(errors) < 1e-5 and np.median(effects) > 0.01


@pytest.mark.parametrize("fields", [{"precision": "mxfp8"}, {"expert_qat": "int4"}], ids=str)
def test_8_bit_weights_besides_are_refused(fields):
    with pytest.raises(UserError, match=f"param_dtype='int8'.*{next(iter(fields))}"):
        rollout_model_def(ModelDef(small(**fields)), SamplerConfig(param_dtype="int8"))
