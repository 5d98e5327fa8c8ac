"""The config of benchmarks.summary_prices: chains whose summaries may have any number of items.

The network of configs/memory_chain.py plays chains that ask for any of their items at the end, in SFT and in RL, so
that every item that a summary keeps is worth as much. The expert of SFT keeps any number of them. So RL finds
summaries of every length among its samples, and its price of summary tokens decides.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from composer_jax.demo import memory_chain
from composer_jax.demo.expert_traces import ExpertTraces
from composer_jax.demo.prompts import REQUESTS
from composer_jax.tasks.task import Split, Task
from configs import memory_chain as chain_config

STEPS = 7
"""Messages of a chain: five files with an item, the file that asks, and the answer."""
CONTEXT = 256
"""Tokens that a chain without summaries needs."""
SUMMARY_TOKENS = 48
"""Tokens of the longest summary, which has room for all five items."""
WHOLE, SUMMARIZED = "chain_whole", "chain"


class AnyItemChain:
    """Memory chains that ask for any of their items (tasks/family.py: TaskFamily)."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed)."""
        return memory_chain.generate(split, seed, index, steps=STEPS, asked=None)


class ListTraces(ExpertTraces):
    """Traces of the expert, beside those of the demo with lists of any number of items ("chain_some")."""

    KINDS: Mapping[str, tuple[str, str]] = {**ExpertTraces.KINDS, "chain_some": (memory_chain.FAMILY, "some")}


def get_config(size: str = "full") -> ConfigDict:
    """size: of configs/memory_chain.py. Only the tokens of summaries have a price."""
    config: Any = chain_config.get_config(size)
    config.tasks.families = {memory_chain.FAMILY: "benchmarks.summary_prices_config:AnyItemChain"}
    counts = {"chain_some": 1600, "chain_whole": 300} if size == "full" else {"chain_some": 8, "chain_whole": 8}
    options = {"traces": counts, "chain_steps": STEPS}
    config.sft.sources = {"chains": {"kind": "benchmarks.summary_prices_config:ListTraces", "options": options}}
    config.agent.compactions = {
        "none": config.agent.compactions.none,
        "some": {
            **config.agent.compactions.short,
            "request": REQUESTS["some"],
            "max_segments": STEPS,
            "max_summary_tokens": SUMMARY_TOKENS,
        },
    }
    config.agent.limits.update({"max_turns": STEPS, "max_episode_tokens": 1000})
    config.sampler.max_model_len = CONTEXT
    config.rl.update({"compaction": "some", "batches": ((144, 32), (CONTEXT, 4))})
    config.rl.reward.summary_token = 0.1
    suite = config.evaluate.suites.chain
    config.evaluate.suites = {
        WHOLE: {**suite, "compaction": "none"},
        SUMMARIZED: {**suite, "compaction": "some", "compare_to": WHOLE},
    }
    config.evaluate.update({"headline": (SUMMARIZED,), "heldout_compaction": "some"})
    return config
