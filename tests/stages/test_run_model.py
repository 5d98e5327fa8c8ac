"""RunModel: the parts of a run that its config names."""

import dataclasses
import types

import numpy as np
import pytest

from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from composer_jax.schema.run_config import run_config
from composer_jax.stages.run_model import RunModel
from composer_jax.train.losses import LanguageLossConfig
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
    model = RunModel(CONFIG, tmp_path, mesh=lambda stage: mesh, data=None, workdir=None)
    assert model.utilisation("rl", CONFIG.rl.loss) == Utilisation(CONFIG.model, peak=2 * 989e12)
    modules_alone = LanguageLossConfig(mtp_weight=0.1, trained="mtp")
    expected = Utilisation(CONFIG.stage_model("sft"), 2 * 989e12, trains_mtp=True, trains_trunk=False)
    assert model.utilisation("sft", modules_alone) == expected
    h100.device_kind = "cpu"
    assert model.utilisation("rl", CONFIG.rl.loss) is None


def test_unknown_chat_format_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(
        UserError, match="config.data.chat_format='chatml' is unknown; use one of compact, or an import"
    ):
        chat_of("chatml", tmp_path)
