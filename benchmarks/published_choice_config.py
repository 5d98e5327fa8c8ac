"""Greedy attempts at training tasks that neither SFT nor RL has: the config of benchmarks.published_rl --choose."""

from typing import Any

from ml_collections import ConfigDict

from configs import smollm2_135m

TASKS = 128
SEED = 1_000_000
"""Added to that of the run, from which its training tasks follow."""


def get_config(size: str) -> ConfigDict:
    """size: of configs/smollm2_135m.py. Every family of its tasks has a suite, whose base is the policy after SFT."""
    config: Any = smollm2_135m.get_config(size)
    one = next(iter(config.evaluate.suites.values())).to_dict()
    one |= {"split": "train", "tasks": min(TASKS, 2 * one["tasks"]), "attempts": 1}
    suites = {name: {**one, "family": name} for name in config.tasks.families}
    config.stages = ()
    with config.unlocked():
        config.evaluate.suites = ConfigDict(suites)
    config.evaluate.update({"which": ("before",), "temperature": 0.0, "headline": tuple(suites)})
    return config
