"""The traffic section of a config: values out of range are named by their path."""

import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.config import TrafficConfig
from composer_jax.schema.run_config import run_config
from configs.tiny import get_config


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"simulated_fraction": 1.0}, "traffic.simulated_fraction=1.0 leaves nothing of the traffic"),
        ({"minibatch_sessions": 0}, "traffic.minibatch_sessions=0; it must be at least 1"),
        ({"learning_rate": 0.0}, "traffic.learning_rate=0.0 learns nothing"),
        ({"kl_limit": 0.0}, "traffic.kl_limit=0.0 stops every update"),
    ],
)
def test_values_out_of_range_are_named(fields, sentence):
    with pytest.raises(UserError, match=sentence):
        TrafficConfig(**fields)


def test_a_config_sets_every_rule_of_a_release():
    config = get_config("smoke")
    config.traffic.batch.min_sessions, config.traffic.gate.margin, config.traffic.canary.harm = 16, 0.1, 0.5
    config.traffic.batch.weights.own = {"seconds": -0.1}
    traffic = run_config(config).traffic
    assert (traffic.batch.min_sessions, traffic.gate.margin, traffic.canary.harm) == (16, 0.1, 0.5)
    assert traffic.batch.weights.own == {"seconds": -0.1}
    config.traffic.batch.cap_user = 0.0
    with pytest.raises(UserError, match="traffic.batch.cap_user=0.0 is not a share above 0"):
        run_config(config)
