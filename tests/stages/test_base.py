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


def test_a_run_takes_network_weights_tokenizer_and_chat_format_of_its_base(folder, tmp_path):
    with Run(config_with(folder), tmp_path / "run") as run:
        stored = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
        assert stored["model"]["d_model"] == NETWORK.d_model and stored["base"] == f"hf:{folder}"
        chex.assert_trees_all_equal(jax.device_get(run.model.initial_weights()), jax.device_get(weights()))
        ids = run.model.chat.render_assistant("def f(): pass", [])
        assert run.model.tokenizer.decode(ids) == "def f(): pass<|im_end|>"
        assert (tmp_path / "run" / "base" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
        # Stages that are left out are skipped.
        assert run.model.stage_before("sft") is None and run.model.stage_before("rl") == "sft"
        for stage, sentence in (("pretrain", "leaves out pretrain"), ("rl", "stage 'sft' is not done")):
            with pytest.raises(UserError, match=sentence):
                run.model.weights_before(stage)


YARN = {"factor": 2.0, "original_context": 4096}
CONTRADICTIONS = {
    "model.n_layers": ({"n_layers": 3}, "n_layers=2 of hf:.*; leave it out"),
    "model.rope_theta": ({"rope_theta": 5.0}, "rope_theta=10000.0 of hf:"),
    "model.max_context": ({"max_context": 8192}, "4096 tokens that hf:.* allows"),
    "a context longer than YaRN's": ({"max_context": 9000, "yarn": YARN}, "8192 tokens"),
}


@pytest.mark.parametrize(("changes", "sentence"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_config_that_contradicts_its_base_is_refused(folder, tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Run(config_with(folder, **changes), tmp_path / "run")


@pytest.mark.parametrize("stages", [("sft", "pretrain"), ("rl", "rl"), ("serve",)])
def test_stages_are_named_in_their_order(folder, stages):
    config = config_with(folder)
    config.stages = stages
    with pytest.raises(UserError, match="is not a selection of pretrain, sft, rl"):
        run_config(config)


def test_a_context_may_be_shorter_than_that_of_the_base(folder, tmp_path):
    with Run(config_with(folder, max_context=2048), tmp_path / "run") as run:
        assert run.config.model.max_context == 2048


def test_yarn_extends_the_context_of_a_base(folder, tmp_path):
    with Run(config_with(folder, max_context=8192, yarn=YARN), tmp_path / "run") as run:
        assert run.config.model.yarn is not None and run.config.model.max_context == 8192
        chex.assert_trees_all_equal(jax.device_get(run.model.initial_weights()), jax.device_get(weights()))


def test_a_base_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no folder .*missing"):
        Run(config_with(tmp_path / "missing"), tmp_path / "run")


def test_a_base_with_too_large_a_tokenizer_or_none_is_refused(tmp_path):
    for added, sentence in ((200, "the embedding 512 rows"), (0, "has no tokenizer.json")):
        folder = write_base(tmp_path / f"model{added}", added=added)
        if not added:
            (folder / "tokenizer.json").unlink()
            (folder / "tokenizer_config.json").unlink()
        with Run(config_with(folder), tmp_path / f"run{added}") as run, pytest.raises(UserError, match=sentence):
            _ = run.model.chat


def test_a_config_words_the_declaration_of_tools_to_a_base_without_any(tmp_path):
    config = config_with(write_base(tmp_path / "model", chat="chatml"))
    config.data.tool_prompt = "Use {tools}!"
    tools = [Declaration("read", "Reads.", {"type": "object"})]
    with Run(config, tmp_path / "run") as run:
        ids = run.model.chat.render([Message("user", "x")], tools)
        assert 'system\nUse {"name": "read"' in run.model.tokenizer.decode(ids)
    config.data.tool_prompt = "Use tools!"
    with pytest.raises(UserError, match="data.tool_prompt lacks {tools} or {signatures}"):
        run_config(config)
