"""Settings: every field of a config is checked, and a wrong one is named with its whole path."""

import copy

import pytest

from composer_jax.errors import UserError
from composer_jax.stages.settings import settings_from
from configs.tiny import SIZES, get_config

CONFIG = get_config("smoke").to_dict()


def changed(path: str, value):
    """A deep copy of CONFIG with one field set, or removed if value is KeyError."""
    config = copy.deepcopy(CONFIG)
    *groups, name = path.split(".")
    node = config
    for group in groups:
        node = node[group]
    if value is KeyError:
        del node[name]
    else:
        node[name] = value
    return config


@pytest.mark.parametrize("size", SIZES)
def test_the_configs_that_are_there_are_valid(size):
    config = get_config(size)
    assert settings_from(config) == settings_from(config.to_dict())


def test_a_config_that_does_not_exist_is_named():
    with pytest.raises(UserError, match="'huge'.*full, smoke, sharded"):
        get_config("huge")


def test_values_arrive_as_they_are():
    settings = settings_from(CONFIG)
    assert settings.model.n_experts == 8
    assert settings.rl.trigger == (126, 140)
    assert settings.rl.groups["bugfix"] == CONFIG["rl"]["groups"]["bugfix"]
    assert settings.rl.optimizer.peak == CONFIG["rl"]["optimizer"]["peak"]


def test_lists_become_tuples_at_every_depth():
    """A sequence set on the command line may be a list; shapes are compared with tuples later."""
    settings = settings_from(changed("sampler.prefill_shapes", [[16, 32], [4, 128]]))
    assert settings.sampler.prefill_shapes == ((16, 32), (4, 128))
    assert settings_from(changed("rl.batches", ([256, 16],))).rl.batches == ((256, 16),)


def test_whole_numbers_are_fine_where_fractions_are_asked_for():
    assert settings_from(changed("rl.optimizer.clip", 2)).rl.optimizer.clip == 2.0


@pytest.mark.parametrize(
    "path", ["nonsense", "rl.nonsense", "rl.optimizer.nonsense", "model.nonsense", "mesh.pipeline"]
)
def test_unknown_fields_are_named_with_their_path(path):
    with pytest.raises(UserError, match=rf"Unknown field config\.{path}"):
        settings_from(changed(path, 1))


@pytest.mark.parametrize("path", ["seed", "rl", "rl.steps", "sft.optimizer.b2", "model.n_heads", "sampler.capacity"])
def test_missing_fields_are_named_with_their_path(path):
    with pytest.raises(UserError, match=rf"config\.{path} is missing"):
        settings_from(changed(path, KeyError))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rl.steps", "many"),
        ("rl.steps", 2.5),
        ("rl.steps", True),
        ("rl.optimizer.peak", "3e-4"),
        ("rl.optimizer.peak", True),
        ("rl.optimizer", 3),
        ("model.tie_embeddings", 1),
        ("model.q_lora_rank", "12"),
        ("data.source", None),
        ("rl.trigger", 130),
        ("rl.trigger", (126, 130, 140)),
        ("rl.trigger", (126, "140")),
        ("data.extensions", ".py"),
        ("sampler.prefill_shapes", (16, 32)),
        ("rl.groups", 4),
        ("rl.groups", {"bugfix": "two"}),
        ("sft.rates", {"bugfix": 3}),
    ],
    ids=str,
)
def test_values_of_a_wrong_type_are_named_with_their_path(path, value):
    with pytest.raises(UserError, match=rf"config\.{path}"):
        settings_from(changed(path, value))


def test_what_the_model_refuses_is_said_in_its_words():
    with pytest.raises(UserError, match="experts_per_token=9 is more than n_experts=8"):
        settings_from(changed("model.experts_per_token", 9))


def test_optional_values_may_be_left_empty():
    assert settings_from(changed("model.q_lora_rank", None)).model.q_lora_rank is None
    assert settings_from(changed("model.q_lora_rank", 12)).model.q_lora_rank == 12
