"""The config of benchmarks.summary_prices: RL of configs/tiny.py on memory chains alone, with reports for summaries."""

from typing import Any

from ml_collections import ConfigDict

from configs import tiny

SUITES = ("chain_whole", "chain_long")


def get_config(size: str = "full") -> ConfigDict:
    """size: of configs/tiny.py. A report has room for all items of a chain, so it can become shorter."""
    config: Any = tiny.get_config(size)
    config.rl.groups = {"memory_chain": 4} if size == "full" else {"memory_chain": 1}
    config.rl.curriculum.ladders = {}
    config.rl.compaction = "long"
    config.evaluate.suites = {name: config.evaluate.suites[name] for name in SUITES}
    config.evaluate.headline = SUITES[-1:]
    return config
