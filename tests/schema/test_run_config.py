"""RunConfig: every field of a config is checked, and a wrong one is named with its whole path."""

import copy
import dataclasses
import operator
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


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        # A sequence set on the command line may be a list; shapes are compared with tuples later.
        ("sampler.prefill_shapes", [[16, 32], [4, 128]], ((16, 32), (4, 128))),
        ("rl.batches", ([512, 16],), ((512, 16),)),
        ("rl.optimizer.clip", 2, 2.0),
        ("model.q_lora_rank", None, None),
        ("model.q_lora_rank", 12, 12),
        ("rl.steps", KeyError, 100),
    ],
)
def test_lists_whole_numbers_and_missing_values_are_taken(path, value, expected):
    assert operator.attrgetter(path)(run_config(changed(path, value))) == expected


WRONG_TYPES = [
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
]
UNKNOWN = ("nonsense", "rl.nonsense", "rl.optimizer.nonsense", "model.nonsense", "mesh.pipeline")
MISSING = ("model", "evaluate.suites.bugfix.family", "model.n_heads")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        *((path, 1, f"Unknown field config.{path}") for path in UNKNOWN),
        *((path, KeyError, f"config.{path} is missing") for path in MISSING),
        *((path, value, f"config.{path}") for path, value in WRONG_TYPES),
        ("model.experts_per_token", 9, "experts_per_token=9 is more than n_experts=8"),
        ("agent.compactions.none.history_file", True, "none.history_file is gone: a summary keeps"),
        ("rl.groups", {"bugfix": -1}, "bugfix=-1"),
        ("rl.group_size", 1, "group_size=1"),
        ("rl.steps", 0, "rl.steps=0"),
        ("rl.uncompacted_fraction", 1.5, "uncompacted_fraction=1.5"),
        ("rl.trigger", (140, 126), r"rl.trigger=\(140, 126\)"),
        ("rl.batches", ((512, 2), (256, 16)), "ascending row lengths"),
        ("rl.batches", (), "rl.batches is empty"),
        ("sampler.max_model_len", 1024, "max_model_len=1024 lets .* rl.batches, .* rows of 512"),
        ("rl.family_compactions", {"bugfix": "huge"}, "family_compactions.bugfix='huge'"),
        ("rl.compaction", "huge", "rl.compaction='huge'"),
        ("pretrain.steps", 0, "pretrain.steps=0"),
        ("sft.accumulate", 0, "sft.accumulate=0"),
        ("sft.accumulate", 7, "sft.*accumulate=7 micro-batches"),
        ("pretrain.evaluate_every", 0, "pretrain.*evaluate_every=0"),
        ("sft.seq_len", 1, "sft.*seq_len=1"),
        ("sft.router_bias_update_rate", -1.0, "sft.*update_rate=-1.0"),
        ("pretrain.sources.copying.weight", -0.5, " weight=-0.5"),
        ("pretrain.sources.copying.final_weight", -0.5, "final_weight=-0.5"),
        ("agent.concurrency", 0, "concurrency=0"),
        ("agent.limits.max_turns", 0, "max_turns=0"),
        ("data.max_bytes", 0, "max_bytes=0"),
        ("evaluate.suites.bugfix.attempts", 0, "bugfix has attempts=0"),
        ("evaluate.suites.bugfix.family", "rust", "bugfix.family='rust'"),
        ("evaluate.suites.chain.compare_to", "x", "chain.compare_to names the suite 'x'"),
        ("evaluate.headline", ("nothing",), "headline names the suite 'nothing'"),
        ("evaluate.every", {"nothing": 5}, "every names the suite 'nothing'"),
        ("evaluate.every", {"heldout_bugs": 5}, "tasks.heldout is empty"),
        ("evaluate.every", {"bugfix": 0}, "every.bugfix=0"),
        ("evaluate.during", ("pretrain",), "during names 'pretrain'"),
        ("evaluate.slots_fraction", 0.0, "slots_fraction=0.0"),
        ("evaluate.effort", "high", "effort 'high'"),
        ("rl.reward.effort.levels", {"high": {"length_factor": -1.0}}, "length_factor=-1.0"),
        ("rl.reward.penalties.malformed_calls", -1.0, "malformed_calls=-1.0"),
        ("evaluate.heldout_attempts", 0, "heldout_attempts=0"),
        ("mesh.expert", 0, "mesh.expert=0"),
        ("sampler.slots", 0, "sampler.slots=0"),
        ("rl.optimizer.peak", 0.0, "peak=0.0"),
        ("profile.steps", "12:10", "profile.steps='12:10' is not FIRST:LAST"),
        ("profile.steps", "9999:10000", "profile.steps=9999:10000 ends after the last step"),
    ],
    ids=str,
)
def test_what_cannot_be_is_named(path, value, words):
    with pytest.raises(UserError, match=words):
        run_config(changed(path, value))


def test_fields_that_the_attention_kind_does_not_take_are_refused_at_once():
    with pytest.raises(UserError, match="n_kv_heads=2"):
        run_config(changed("model.n_kv_heads", 2))
    config = changed("sft.model", {"heads_at_once": 1})
    assert run_config(config).stage_model("sft").heads_at_once == 1
    config["model"] |= {"kv_lora_rank": None, "n_kv_heads": config["model"]["n_heads"]}
    with pytest.raises(UserError, match="heads_at_once=1"):
        run_config(config)


@pytest.mark.parametrize("stage", ["pretrain", "sft", "rl"])
def test_attention_that_cannot_be_clipped_is_refused_at_once(stage):
    config = changed(f"{stage}.optimizer.qk_clip", 100.0)
    assert getattr(run_config(config), stage).optimizer.qk_clip == 100
    config["model"] |= {"kv_lora_rank": None, "n_kv_heads": config["model"]["n_heads"], "qk_norm": True}
    with pytest.raises(UserError, match="qk_norm=True"):
        run_config(config)


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
    assert not outdated_fields(get_config("smoke").to_dict())


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
