"""The scripts of examples/ run, and print what they promise."""

import asyncio

from composer_jax.observe.episodes import write_episodes
from examples import add_tool, read_episodes, sample_weights

EPISODE = {
    "task_id": "t0",
    "family": "bugfix",
    "split": "train",
    "seed": 7,
    "reward": 0.0,
    "outcome": "no_call",
    "turns": 1,
    "summaries": 0,
    "condition": "default",
    "step": None,
    "tokens": 5,
    "sampled_tokens": 3,
    "summary_tokens": 0,
    "parts": {"detail": "0 of 2 hidden cases pass"},
    "instruction": "Fix it.",
    "segments": [
        [
            {"kind": "prompt", "text": "Fix it.", "tokens": 2, "sampled": False, "version": None, "calls": []},
            {
                "kind": "assistant",
                "text": "",
                "tokens": 3,
                "sampled": True,
                "version": 0,
                "calls": [{"name": "read", "arguments": {"path": "a.py"}, "error": None}],
            },
        ]
    ],
}


def test_read_episodes(tmp_path, capsys):
    path = write_episodes(tmp_path / "after.jsonl", [EPISODE, EPISODE | {"reward": 1.0, "outcome": "finished"}])
    read_episodes.main(str(path))
    shown = capsys.readouterr().out
    assert "bugfix: 1 of 2 solved; 1 no_call, 1 finished; 0.0 summaries each" in shown
    assert "t0, seed 7: 0 of 2 hidden cases pass" in shown
    assert "[assistant, 3 tokens]  read({'path': 'a.py'})" in shown


def test_sample_weights_is_fixed_by_the_seed(tmp_path):
    sample_weights.write_small_model(tmp_path / "model")
    sample = lambda seed: asyncio.run(sample_weights.answer(tmp_path / "model", "Add.", 12, seed))  # noqa: E731
    first = sample(0)
    assert first and first == sample(0) and first != sample(1)


def test_add_tool(capsys):
    episode = asyncio.run(add_tool.play())
    assert episode.reward == 1.0
    assert capsys.readouterr().out.splitlines() == ["3 lines", "ok", "finished, reward 1.0"]
