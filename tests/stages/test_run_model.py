"""RunModel: the parts of a run that its config names."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from composer_jax.models import supported_dtype
from composer_jax.ops.local_gpu import LocalGpu
from composer_jax.parallel.mesh import make_mesh
from composer_jax.schema.run_config import run_config
from composer_jax.stages.run_model import RunModel
from composer_jax.storage.workdir import Workdir
from composer_jax.train.losses import LanguageLossConfig
from composer_jax.train.optimizer import OptimizerConfig
from composer_jax.train.utilisation import Utilisation
from configs.tiny import get_config

CONFIG = run_config(get_config("smoke"))


class OwnFormat(CompactFormat):
    """A chat format of a user."""


def chat_of(name, path):
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, chat_format=name))
    data = types.SimpleNamespace(tokenizer=Tokenizer.train(["some text"] * 10, 300))
    return RunModel(config, path, mesh=None, data=data, workdir=None).chat


@pytest.mark.parametrize(("name", "kind"), [("compact", CompactFormat), (f"{__name__}:OwnFormat", OwnFormat)])
def test_chat_format_by_name_and_by_import_path(tmp_path, name, kind):
    assert type(chat_of(name, tmp_path)) is kind


def test_the_share_of_the_peak_is_of_the_network_and_the_weights_that_a_stage_trains(tmp_path):
    h100 = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    mesh = types.SimpleNamespace(devices=np.asarray([h100] * 2))
    sft = dataclasses.replace(CONFIG.sft, loss=LanguageLossConfig(mtp_weight=0.1, trained="mtp"))
    config = dataclasses.replace(CONFIG, sft=sft)
    model = RunModel(config, tmp_path, mesh=lambda stage: mesh, data=None, workdir=None)
    assert model.utilisation("rl") == Utilisation(CONFIG.model, peak=2 * 989e12)
    expected = Utilisation(CONFIG.stage_model("sft"), 2 * 989e12, trains_mtp=True, trains_trunk=False)
    assert model.utilisation("sft") == expected
    h100.device_kind = "cpu"
    assert model.utilisation("rl") is None


def test_a_run_goes_on_with_its_checkpoints_on_a_card_without_bfloat16(tmp_path, monkeypatch):
    network = dataclasses.replace(CONFIG.model, param_dtype="bfloat16", compute_dtype="bfloat16")
    sft = dataclasses.replace(CONFIG.sft, optimizer=OptimizerConfig(moment_dtype="bfloat16"))
    config, mesh = dataclasses.replace(CONFIG, model=network, sft=sft), make_mesh(jax.devices()[:1])

    def stored_and_computed():
        with Workdir(tmp_path, {}) as workdir:
            model = RunModel(config, tmp_path, mesh=lambda stage: mesh, data=None, workdir=workdir)
            learner = model.learner("sft")
            notes = model.store("sft")._notes
            return (learner.abstract_state(), notes), {model.definition.config, learner.definition.config}

    stored, computed = stored_and_computed()
    assert computed == {network}
    monkeypatch.setattr(supported_dtype, "local_gpu", lambda: LocalGpu("Tesla T4", (7, 5), 91002))
    stored_here, computed_here = stored_and_computed()
    assert computed_here == {dataclasses.replace(network, compute_dtype="float32")}
    assert stored_here == stored


def test_updates_with_equal_sections_share_a_learner_and_its_programs(tmp_path):
    mesh = make_mesh(jax.devices()[:1])
    model = RunModel(CONFIG, tmp_path, mesh=lambda stage: mesh, data=None, workdir=None)
    slower = dataclasses.replace(CONFIG.rl, optimizer=OptimizerConfig(peak=1e-6))
    learner = model.learner("rl", slower)
    assert learner.optimizer.config.peak == 1e-6
    assert model.learner("rl", dataclasses.replace(slower)) is learner
    assert model.learner("rl") is not learner and model.learner("rl").optimizer.config == CONFIG.rl.optimizer
    assert model.learner("rl", CONFIG.rl).optimizer.config == CONFIG.rl.optimizer


def test_unknown_chat_format_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(
        UserError, match="config.data.chat_format='chatml' is unknown; use one of compact, or an import"
    ):
        chat_of("chatml", tmp_path)
