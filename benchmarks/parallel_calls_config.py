"""The config of benchmarks.parallel_calls: lookups, played by the network of configs/memory_chain.py."""

from typing import Any

from ml_collections import ConfigDict

from composer_jax.demo.lookups import LOOKUPS, FewLookups, ManyLookups
from configs import memory_chain

LONGEST = 256
"""Tokens of an episode with four files in as many messages."""
PRICE = 0.2
"""Weight of the length cost, which is 0.29 for two messages and 0.58 for five."""


def get_config(size: str = "full") -> ConfigDict:
    """size: of configs/memory_chain.py. Messages have a price in RL, and nothing else does."""
    config: Any = memory_chain.get_config(size)
    config.data.tokenizer_texts = {"lookups": {"kind": "composer_jax.demo.lookups:lookup_texts", "count": 400}}
    config.tasks.families = {
        name: f"composer_jax.demo.lookups:{type(family).__name__}" for name, family in LOOKUPS.items()
    }
    few, many = FewLookups.FAMILY, ManyLookups.FAMILY
    traces = {few: 500, many: 1000} if size == "full" else {few: 8, many: 8}
    config.sft.sources = {
        "lookups": {"kind": "composer_jax.demo.expert_traces:ExpertTraces", "options": {"traces": traces}}
    }
    config.sft.seq_len = LONGEST
    if size == "full":
        config.sft.steps = 1000
    config.agent.compactions = {"none": config.agent.compactions.none}
    config.agent.limits.update({"max_turns": 6, "max_turn_tokens": 128, "max_episode_tokens": LONGEST})
    config.sampler.update({"max_model_len": LONGEST, "prefill_shapes": ((48, 20), (16, 64))})
    config.rl.groups = {few: 4, many: 4} if size == "full" else {few: 1, many: 1}
    config.rl.update({"compaction": "none", "batches": ((LONGEST, 16),)})
    config.rl.reward.update({"weight": PRICE, "turn": 1.0, "summary_token": 0.0})
    suite = {"tasks": 32, "attempts": 4} if size == "full" else {"tasks": 2, "attempts": 2}
    config.evaluate.suites = {name: {"family": name, "compaction": "none", **suite} for name in (few, many)}
    config.evaluate.update({"headline": (many,), "heldout_compaction": "none"})
    return config
