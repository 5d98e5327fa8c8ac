"""RL on eight devices, from a small published model with random weights: get_config takes its folder.

Every reward is 0, so the algorithm compares it with a fixed number: every episode is trained. Every first turn gets a
hint.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from ml_collections import ConfigDict

from composer_jax.rl.hint_detectors import Hint, ParsedEpisode
from configs import smollm2_135m


class FixedBaseline:
    """An RL algorithm: the distance of a reward from one half."""

    def __call__(self, rewards: Sequence[float]) -> np.ndarray:
        return np.asarray(rewards, np.float32) - np.float32(0.5)


def remind(parsed: ParsedEpisode) -> Iterable[Hint]:
    """A detector that finds a mistake in every first turn."""
    if parsed.turns:
        yield Hint(0, "Reminder: call a tool.")


def get_config(base: str) -> ConfigDict:
    config = smollm2_135m.get_config("smoke")
    config.base = f"hf:{base}"
    config.stages = ("rl",)
    config.mesh.update({"cpu_devices": 8, "replica": 1, "data": 2, "expert": 4})
    config.model.update({"dispatch": "ring", "remat_saves": ()})
    config.agent.system_prompt = ""
    config.agent.limits.update({"max_turns": 2, "max_turn_tokens": 8, "max_episode_tokens": 4096})
    config.agent.concurrency = 2
    config.sampler.update({"slots": 8, "max_model_len": 2048, "decode_steps": 4, "prefill_shapes": ((8, 256),)})
    config.rl.update({"steps": 3, "group_size": 4, "batches": ((2048, 8),), "save_every": 2, "max_staleness": 1})
    config.rl.deterministic = True
    config.rl.groups.bugs = 1
    config.rl.algorithm.update({"name": "tests.stages.two_hosts_config:FixedBaseline", "options": {}})
    config.rl.algorithm.kl.coefficient = 0.01
    config.rl.feedback.update({"weight": 0.5, "detectors": ("tests.stages.two_hosts_config:remind",)})
    config.rl.optimizer.peak = 1e-2
    config.evaluate.suites = {"bugs": {"family": "bugs", "tasks": 2, "attempts": 2, "compaction": "none"}}
    config.evaluate.headline = ("bugs",)
    return config
