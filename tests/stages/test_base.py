"""Runs that start from a base: what the config takes from it, and what it may not contradict."""

import dataclasses
import json

import chex
import jax
import pytest

from composer_jax.checkpoint.base_model import NETWORK_FIELDS, ModelOfBase
from composer_jax.data.chat.chat_format import Message
from composer_jax.errors import UserError
from composer_jax.rl.config import RLConfig
from composer_jax.schema.run_config import RunConfig, config_dict, run_config
from composer_jax.stages.run import Run
from configs import base
from tests.data.formats import Declaration
from tests.data.model_folders import CHATML
from tests.stages.base_model import NETWORK, weights, write_base


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("published") / "model")


def config_with(folder, **model):
    config = base.get_config("1024")
    config.base = f"hf:{folder}"
    config.mesh.update({"cpu_devices": 1, "replica": 1})
    config.sampler.slots = 8
    config.model.update(model)
    return config


def test_the_base_says_what_the_network_is(folder):
    model = run_config(config_with(folder, remat=False)).model
    assert {name: getattr(model, name) for name in NETWORK_FIELDS} == {
        name: getattr(NETWORK, name) for name in NETWORK_FIELDS
    }
    assert model.remat is False and model.head_chunk == 2048


def test_without_a_base_a_config_needs_sizes():
    with pytest.raises(UserError, match="config.base is empty and config.model has no sizes; name a base"):
        run_config(config_dict(RunConfig(ModelOfBase())))


def test_a_file_may_state_a_part_of_the_network(folder):
    """The rest is the base's, and what is stated is checked against it; until then the network is unknown."""
    rl = RLConfig(router_replay="on", batches=((2048, 1),))
    model = ModelOfBase(n_mtp_modules=1, max_context=2048, compute_dtype="float32")
    config = config_dict(RunConfig(model, f"hf:{folder}", rl=rl))
    assert (config.model.n_mtp_modules, config.model.max_context, config.model.d_model) == (1, 2048, None)
    assert run_config(config).model == dataclasses.replace(NETWORK, n_mtp_modules=1, max_context=2048)
    config.model.update({"d_model": NETWORK.d_model, "remat_saves": ("anything",)})
    with pytest.raises(UserError, match="remat_saves"):
        run_config(config)


def test_a_run_keeps_what_its_base_says(folder, tmp_path):
    with Run(config_with(folder), tmp_path / "run"):
        stored = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert stored["model"]["d_model"] == NETWORK.d_model and stored["base"] == f"hf:{folder}"


def test_initial_weights_are_those_of_the_base(folder, tmp_path):
    with Run(config_with(folder), tmp_path / "run") as run:
        chex.assert_trees_all_equal(jax.device_get(run.model.initial_weights()), jax.device_get(weights()))


def test_stages_that_are_left_out_are_skipped(folder, tmp_path):
    with Run(config_with(folder), tmp_path / "run") as run:
        assert run.model.stage_before("sft") is None and run.model.stage_before("rl") == "sft"
        with pytest.raises(UserError, match=r"config.stages=\('sft', 'rl'\) leaves out pretrain"):
            run.model.weights_before("pretrain")
        with pytest.raises(UserError, match="stage 'sft' is not done in .*; run it first"):
            run.model.weights_before("rl")


@pytest.mark.parametrize("stages", [("sft", "pretrain"), ("rl", "rl"), ("serve",)])
def test_stages_are_named_in_their_order(folder, stages):
    config = config_with(folder)
    config.stages = stages
    with pytest.raises(UserError, match="is not a selection of pretrain, sft, rl in this order"):
        run_config(config)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_layers": 3}, "config.model.n_layers=3 differs from n_layers=2 of hf:.*; leave it out"),
        ({"rope_theta": 5.0}, "config.model.rope_theta=5.0 differs from rope_theta=10000.0 of hf:"),
        ({"max_context": 8192}, "config.model.max_context=8192 is longer than the 4096 tokens that hf:.* allows"),
    ],
)
def test_a_config_that_contradicts_its_base_is_refused(folder, tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Run(config_with(folder, **changes), tmp_path / "run")


def test_a_context_may_be_shorter_than_that_of_the_base(folder, tmp_path):
    with Run(config_with(folder, max_context=2048), tmp_path / "run") as run:
        assert run.config.model.max_context == 2048


def test_yarn_extends_the_context_of_a_base(folder, tmp_path):
    yarn = {"factor": 2.0, "original_context": 4096}
    with Run(config_with(folder, max_context=8192, yarn=yarn), tmp_path / "run") as run:
        assert run.config.model.yarn is not None and run.config.model.max_context == 8192
        chex.assert_trees_all_equal(jax.device_get(run.model.initial_weights()), jax.device_get(weights()))
    with pytest.raises(UserError, match="config.model.max_context=9000 is longer than the 8192 tokens"):
        Run(config_with(folder, max_context=9000, yarn=yarn), tmp_path / "longer")


def test_a_base_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no folder .*missing"):
        Run(config_with(tmp_path / "missing"), tmp_path / "run")


def test_tokenizer_and_chat_format_are_those_of_the_base(folder, tmp_path):
    with Run(config_with(folder), tmp_path / "run") as run:
        ids = run.model.chat.render_assistant("def f(): pass", [])
        assert run.model.tokenizer.decode(ids) == "def f(): pass<|im_end|>"
        assert (tmp_path / "run" / "base" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    folder = write_base(tmp_path / "model", added=200)
    with (
        Run(config_with(folder), tmp_path / "run") as run,
        pytest.raises(UserError, match="ids and the embedding 512 rows"),
    ):
        _ = run.model.chat


def test_a_base_without_a_tokenizer_is_refused(tmp_path):
    folder = write_base(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with Run(config_with(folder), tmp_path / "run") as run, pytest.raises(UserError, match="has no tokenizer.json"):
        _ = run.model.chat


def test_a_config_words_the_declaration_of_tools_to_a_base_without_any(tmp_path):
    config = config_with(write_base(tmp_path / "model", template=CHATML))
    config.data.tool_prompt = "Use {tools}!"
    tools = [Declaration("read", "Reads.", {"type": "object"})]
    with Run(config, tmp_path / "run") as run:
        ids = run.model.chat.render([Message("user", "x")], tools)
        assert 'system\nUse {"name": "read"' in run.model.tokenizer.decode(ids)
    config.data.tool_prompt = "Use tools!"
    with pytest.raises(UserError, match="data.tool_prompt lacks {tools} or {signatures}"):
        run_config(config)
