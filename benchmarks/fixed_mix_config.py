"""The config of benchmarks.ladder: configs/tiny.py, in which the bugs of RL are a fixed mix instead of a ladder."""

from typing import Any

from ml_collections import ConfigDict

from configs import tiny


def get_config(size: str = "full") -> ConfigDict:
    """size: of configs/tiny.py. Every step has as many groups as there, of all rungs in equal parts."""
    config: Any = tiny.get_config(size)
    rungs = [(family, *harder) for family, harder in config.rl.curriculum.ladders.items()]
    config.rl.curriculum.window, config.rl.curriculum.ladders = 0, {}
    for families in rungs:
        share, rest = divmod(config.rl.groups[families[0]], len(families))
        config.rl.groups.update({family: share + (i < rest) for i, family in enumerate(families)})
    return config
