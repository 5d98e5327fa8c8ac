"""The config of benchmarks.feedback: the network of configs/memory_chain.py, with a habit from SFT."""

from typing import Any

from ml_collections import ConfigDict

from benchmarks.tool_habit import DETECTOR, MAX_TURNS
from configs import memory_chain

LONGEST = 288
"""Tokens of an episode with a wrong call before each read, and of a context with a hint."""


def get_config(size: str = "full") -> ConfigDict:
    """size: of configs/memory_chain.py. Chains are short and played without compaction; feedback is off."""
    config: Any = memory_chain.get_config(size)
    config.tasks.families = {"memory_chain": "benchmarks.tool_habit:ShortChain"}
    traces = 1200 if size == "full" else 16
    config.sft.sources = {"habit": {"kind": "benchmarks.tool_habit:HabitTraces", "options": {"traces": traces}}}
    config.sft.seq_len = LONGEST
    config.agent.limits.max_turns = MAX_TURNS
    config.sampler.max_model_len = LONGEST
    suite = config.evaluate.suites.chain
    suite.update({"compaction": "none", "attempts": 2})
    config.evaluate.update({"heldout_compaction": "none", "recorded_tasks": suite.tasks})
    config.rl.update({"compaction": "none", "batches": ((LONGEST, 16),), "keep_groups": True})
    config.rl.feedback.detectors = (DETECTOR,)
    if size == "full":
        config.sft.steps = 400
        config.rl.steps = 20
    return config
