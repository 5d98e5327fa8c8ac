"""RunModel: the parts of a run that its config names."""

import dataclasses
import types

import pytest

from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from composer_jax.schema.run_config import run_config
from composer_jax.stages.run_model import RunModel
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


def test_unknown_chat_format_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(
        UserError, match="config.data.chat_format='chatml' is unknown; use one of compact, or an import"
    ):
        chat_of("chatml", tmp_path)
