"""The conversations of SFT that RL replays: stored by SFT, or made once from the sources of the config."""

import types

import numpy as np

from composer_jax.schema.run_config import run_config
from composer_jax.stages import sft
from configs import tiny

TRACES = [(np.arange(n, dtype=np.int32), np.arange(n) > 1) for n in (3, 9, 5)]


def test_sources_are_asked_once_and_what_sft_drops_is_not_replayed(tmp_path, monkeypatch):
    config, asked = tiny.get_config("smoke"), []
    config.sft.seq_len = 8
    run = types.SimpleNamespace(
        config=run_config(config), data=types.SimpleNamespace(folder=tmp_path / "data"), workdir=None
    )
    monkeypatch.setattr(sft, "collect_traces", lambda run: asked.append(run) or (TRACES, {}))
    for _ in range(2):
        conversations = sft.sft_conversations(run)
        assert [ids.tolist() for ids, _ in conversations] == [[0, 1, 2], [0, 1, 2, 3, 4]]
        assert [mask.sum() for _, mask in conversations] == [1, 3]
    assert asked == [run]
