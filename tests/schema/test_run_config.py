"""RunConfig: every field of a config is checked, and a wrong one is named with its whole path."""

import copy
import dataclasses
import typing

import pytest

from composer_jax.errors import UserError
from composer_jax.evals.config import SuiteConfig
from composer_jax.schema import sections
from composer_jax.schema.renamed import REMOVED, RENAMED, outdated_fields
from composer_jax.schema.run_config import RunConfig, config_dict, run_config
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
def test_packaged_configs_are_valid(size):
    config = get_config(size)
    assert run_config(config) == run_config(config.to_dict())


def test_a_config_that_does_not_exist_is_named():
    with pytest.raises(UserError, match="'huge'.*full, smoke, sharded"):
        get_config("huge")


def test_values_arrive_as_they_are():
    parsed = run_config(CONFIG)
    assert parsed.model.n_experts == 8
    assert parsed.rl.batches == ((256, 16), (512, 2)) and parsed.rl.trigger is None
    assert parsed.rl.groups["one_bug"] == CONFIG["rl"]["groups"]["one_bug"] > 0
    assert parsed.rl.optimizer.peak == CONFIG["rl"]["optimizer"]["peak"]


def test_lists_become_tuples_at_every_depth():
    """A sequence set on the command line may be a list; shapes are compared with tuples later."""
    parsed = run_config(changed("sampler.prefill_shapes", [[16, 32], [4, 128]]))
    assert parsed.sampler.prefill_shapes == ((16, 32), (4, 128))
    assert run_config(changed("rl.batches", ([512, 16],))).rl.batches == ((512, 16),)


def test_whole_numbers_are_accepted_as_fractions():
    assert run_config(changed("rl.optimizer.clip", 2)).rl.optimizer.clip == 2.0


@pytest.mark.parametrize(
    "path", ["nonsense", "rl.nonsense", "rl.optimizer.nonsense", "model.nonsense", "mesh.pipeline"]
)
def test_unknown_fields_are_named_with_their_path(path):
    with pytest.raises(UserError, match=rf"Unknown field config\.{path}"):
        run_config(changed(path, 1))


@pytest.mark.parametrize("path", ["model", "evaluate.suites.bugfix.family", "model.n_heads"])
def test_missing_fields_are_named_with_their_path(path):
    with pytest.raises(UserError, match=rf"config\.{path} is missing"):
        run_config(changed(path, KeyError))


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
        ("evaluate.suites", {"bugfix": 3}),
        ("tasks.families", {"bugfix": 3}),
    ],
    ids=str,
)
def test_values_of_a_wrong_type_are_named_with_their_path(path, value):
    with pytest.raises(UserError, match=rf"config\.{path}"):
        run_config(changed(path, value))


def test_checks_of_the_model_config_apply():
    with pytest.raises(UserError, match="experts_per_token=9 is more than n_experts=8"):
        run_config(changed("model.experts_per_token", 9))


def test_fields_that_the_attention_kind_does_not_take_are_refused_at_once():
    with pytest.raises(UserError, match="n_kv_heads=2 is a field of grouped-query attention"):
        run_config(changed("model.n_kv_heads", 2))
    config = changed("sft.model", {"heads_at_once": 1})
    assert run_config(config).stage_model("sft").heads_at_once == 1
    config["model"] |= {"kv_lora_rank": None, "n_kv_heads": config["model"]["n_heads"]}
    with pytest.raises(UserError, match="heads_at_once=1 is a field of latent attention"):
        run_config(config)


@pytest.mark.parametrize("stage", ["pretrain", "sft", "rl"])
def test_attention_that_cannot_be_clipped_is_refused_at_once(stage):
    config = changed(f"{stage}.optimizer.qk_clip", 100.0)
    assert getattr(run_config(config), stage).optimizer.qk_clip == 100
    config["model"] |= {"kv_lora_rank": None, "n_kv_heads": config["model"]["n_heads"], "qk_norm": True}
    with pytest.raises(UserError, match=r"optimizer\.qk_clip cannot scale .*qk_norm=True"):
        run_config(config)


def test_optional_values_may_be_left_empty():
    assert run_config(changed("model.q_lora_rank", None)).model.q_lora_rank is None
    assert run_config(changed("model.q_lora_rank", 12)).model.q_lora_rank == 12


def test_missing_fields_take_their_defaults():
    assert run_config(changed("rl.steps", KeyError)).rl.steps == 100


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("rl.groups", {"bugfix": -1}, "rl.groups.bugfix=-1 is negative"),
        ("rl.group_size", 1, "rl.group_size=1; an advantage is a difference"),
        ("rl.steps", 0, "rl.steps=0; it must be at least 1"),
        ("rl.uncompacted_fraction", 1.5, "rl.uncompacted_fraction=1.5 is not a fraction"),
        ("rl.trigger", (140, 126), r"rl.trigger=\(140, 126\) is not a range"),
        ("rl.batches", ((512, 2), (256, 16)), "must have ascending row lengths"),
        ("rl.batches", (), "rl.batches is empty"),
        (
            "sampler.max_model_len",
            1024,
            "sampler.max_model_len=1024 lets episodes grow longer than rl.batches, .* rows of 512",
        ),
        ("rl.family_compactions", {"bugfix": "huge"}, "config.rl.family_compactions.bugfix='huge' is not a compaction"),
        ("rl.compaction", "huge", "config.rl.compaction='huge' is not a compaction; agent.compactions has"),
        ("pretrain.steps", 0, "pretrain.steps=0; it must be at least 1"),
        ("sft.accumulate", 0, "sft.accumulate=0; it must be at least 1"),
        ("sft.accumulate", 7, "rows do not divide into accumulate=7 micro-batches; use a divisor of"),
        ("pretrain.evaluate_every", 0, "pretrain.evaluate_every=0; it must be at least 1"),
        ("sft.seq_len", 1, "sft.seq_len=1; a row needs at least 2 tokens"),
        ("sft.router_bias_update_rate", -1.0, "sft.router_bias_update_rate=-1.0 is negative"),
        ("pretrain.sources.copying.weight", -0.5, "a source of pretrain.sources has weight=-0.5"),
        ("pretrain.sources.copying.final_weight", -0.5, "a source of pretrain.sources has final_weight=-0.5"),
        ("agent.concurrency", 0, "agent.concurrency=0 leaves no sandbox"),
        ("agent.limits.max_turns", 0, "agent.limits.max_turns=0; it must be at least 1"),
        ("data.max_bytes", 0, "data.max_bytes=0; it must be at least 1 byte"),
        ("evaluate.suites.bugfix.attempts", 0, "a suite of bugfix has attempts=0"),
        ("evaluate.suites.bugfix.family", "rust", "config.evaluate.suites.bugfix.family='rust' is not a task family"),
        ("evaluate.suites.chain.compare_to", "x", "evaluate.suites.chain.compare_to names the suite 'x'"),
        ("evaluate.headline", ("nothing",), "evaluate.headline names the suite 'nothing'"),
        ("evaluate.every", {"nothing": 5}, "evaluate.every names the suite 'nothing'; there are bugfix, chain"),
        ("evaluate.every", {"heldout_bugs": 5}, "names the suite 'heldout_bugs', and tasks.heldout is empty"),
        ("evaluate.every", {"bugfix": 0}, "evaluate.every.bugfix=0; it must be at least 1 step"),
        ("evaluate.during", ("pretrain",), "evaluate.during names 'pretrain'; suites can run in sft and rl"),
        ("evaluate.slots_fraction", 0.0, "evaluate.slots_fraction=0.0 is not a share of the slots"),
        ("evaluate.effort", "high", "effort 'high' is not a level of rl.reward.effort.levels, which has none"),
        ("rl.reward.effort.levels", {"high": {"length_factor": -1.0}}, "neither may be negative"),
        ("rl.reward.penalties.malformed_calls", -1.0, "rl.reward.penalties.malformed_calls=-1.0 is negative"),
        ("evaluate.heldout_attempts", 0, "evaluate.heldout_attempts=0"),
        ("mesh.expert", 0, "mesh.expert=0 is not a number of devices"),
        ("sampler.slots", 0, "sampler.slots=0"),
        ("rl.optimizer.peak", 0.0, "optimizer.peak=0.0 is not positive"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named_with_the_way_out(path, value, words):
    with pytest.raises(UserError, match=words):
        run_config(changed(path, value))


def test_outdated_fields_are_refused_with_what_replaces_them():
    sentences = {path: f"is now {new}" for path, new in RENAMED.items()}
    sentences |= {path: f"is gone: {instead}" for path, instead in REMOVED.items()}
    for path, sentence in sentences.items():
        config = copy.deepcopy(CONFIG)
        *sections, name = path.split(".")
        node = config
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = {}
        with pytest.raises(UserError) as error:
            run_config(config)
        assert f"{path} {sentence}" in str(error.value)


def test_no_older_field_is_a_field_of_today():
    assert not outdated_fields(get_config("smoke").to_dict())


def test_a_field_of_any_compaction_that_is_gone_is_refused():
    config = changed("agent.compactions.none.history_file", True)
    with pytest.raises(UserError, match=r"agent.compactions.none.history_file is gone: a summary keeps"):
        run_config(config)


def test_a_config_dict_has_a_field_for_every_flag():
    """Also inside a mapping, for None, and for a fraction that the file writes as a whole number."""
    run = run_config(CONFIG)
    suites = {"own": SuiteConfig("bugfix", tasks=3)}
    evaluate = dataclasses.replace(run.evaluate, suites=suites, headline=(), every={}, temperature=1)
    reward = dataclasses.replace(run.rl.reward, penalties={"malformed_calls": 0})
    run = dataclasses.replace(run, evaluate=evaluate, rl=dataclasses.replace(run.rl, reward=reward))
    config = config_dict(run)
    assert run_config(config) == run and config.rl.trigger is None
    config.update_from_flattened_dict(
        {
            "model.q_lora_rank": 12,
            "evaluate.suites.own.attempts": 7,
            "evaluate.temperature": 0.5,
            "rl.reward.penalties.malformed_calls": 0.1,
            "sft.optimizer.qk_clip": 100.0,
        }
    )
    changed = run_config(config)
    assert changed.model.q_lora_rank == 12 and changed.evaluate.suites["own"].attempts == 7
    assert (changed.evaluate.temperature, changed.rl.reward.penalties) == (0.5, {"malformed_calls": 0.1})
    assert changed.sft.optimizer.qk_clip == 100


def test_sections_has_the_dataclass_of_every_section():
    """A config file needs no other import to state any field."""

    def declared(cls: type) -> set[type]:
        hints = list(typing.get_type_hints(cls).values())
        for hint in hints:
            hints += typing.get_args(hint)
        inner = {hint for hint in hints if isinstance(hint, type) and dataclasses.is_dataclass(hint)}
        return inner.union(*map(declared, inner))

    missing = [cls.__name__ for cls in declared(RunConfig) if getattr(sections, cls.__name__, None) is not cls]
    assert not missing
