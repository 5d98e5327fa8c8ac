"""rl.engines and rl.fleet: addresses, and what contradicts engines elsewhere."""

import pytest

from composer_jax.errors import UserError
from composer_jax.rl.config import RLConfig
from composer_jax.rl.engines.config import FleetConfig, engine_addresses


def test_addresses_are_a_list_or_have_commas_between_them():
    assert engine_addresses("local") == engine_addresses("ray") == ()
    assert engine_addresses("a:1,[::1]:2") == engine_addresses(("a:1", "[::1]:2")) == ("a:1", "[::1]:2")


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        ((), "empty list"),
        ("", "rl.engines names ''"),
        ("near", "rl.engines names 'near'; use 'local', or the HOST:PORT"),
        ("a:1,:2", "rl.engines names ':2'"),
        ("a:0", "rl.engines names 'a:0'"),
        ("a:1,a:1", "names an engine twice"),
        ("a:1,http://b:8000", "names http://b:8000, a server of OpenAI's API, .* neither versions nor routes"),
    ],
)
def test_what_is_no_address_is_refused(engines, says):
    with pytest.raises(UserError, match=says):
        RLConfig(engines=engines, publish="weights")


def test_what_contradicts_engines_elsewhere_is_refused():
    with pytest.raises(UserError, match="rl.engines needs rl.publish"):
        RLConfig(engines="a:1")
    with pytest.raises(UserError, match="rl.rollout_devices=2 is for a sampler of the run"):
        RLConfig(engines="a:1", publish="weights", rollout_devices=2)
    assert not RLConfig(engines="a:1", publish="weights").samples_here and RLConfig().samples_here


def test_engines_of_ray_need_a_folder_and_alone_have_nodes_without_accelerators():
    with pytest.raises(UserError, match="rl.engines needs rl.publish"):
        RLConfig(engines="ray")
    assert RLConfig(engines="ray", publish="weights", fleet=FleetConfig(cpu_nodes=2)).fleet.cpu_nodes == 2
    with pytest.raises(UserError, match="cpu_nodes=2 is about rl.engines='ray', and rl.engines='local'; use 0"):
        RLConfig(fleet=FleetConfig(cpu_nodes=2))
    with pytest.raises(UserError, match="rl.fleet.cpu_nodes=-1 is negative"):
        FleetConfig(cpu_nodes=-1)


@pytest.mark.parametrize("field", ["patience_s", "silence_s", "stall_s"])
def test_seconds_are_positive(field):
    with pytest.raises(UserError, match=f"rl.fleet.{field}=0 is not positive"):
        FleetConfig(**{field: 0.0})
