"""SFT and RL on eight devices, from a small published model with random weights: get_config takes its folder.

Every grade is 0, and a turn costs. The algorithm compares rewards with a fixed number: every episode is trained. Every
first turn gets a hint.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from composer_jax.agent.episode import Episode
from composer_jax.data.chat.chat_format import Message
from composer_jax.demo.repository_bugs import RepositoryBugs
from composer_jax.rl.hint_detectors import Hint, ParsedEpisode
from composer_jax.tasks.task import Split, Task
from configs import smollm2_135m

ROW = 256
"""Tokens of a training row and of the sampler's contexts; a prompt with one tool is half as long."""


class Bugs:
    """Tasks with the shortest prompt: one tool, a sentence."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        task = RepositoryBugs().generate(split, seed, index)
        return dataclasses.replace(task, tools=("finish",), instruction=f"Repair function {index}.")


class Answers:
    """A source of SFT conversations: one answer each."""

    def __init__(self, context, count: int):
        self.context, self.count = context, count

    def traces(self) -> list[tuple[np.ndarray, np.ndarray]]:
        chat, traces = self.context.chat, []
        for index in range(self.count):
            given = [*chat.render([Message("user", f"number {index}")]), *chat.generation_prompt]
            answer = chat.render_assistant(f"{index * index} of {index % 7}", [])
            traces.append((np.array(given + answer, np.int32), np.arange(len(given + answer)) >= len(given)))
        return traces

    def report(self) -> Mapping[str, Any]:
        return {}


class FixedBaseline:
    """An RL algorithm: the distance of a reward from one half."""

    def __call__(self, rewards: Sequence[float]) -> np.ndarray:
        return np.asarray(rewards, np.float32) - np.float32(0.5)


def turns(episode: Episode) -> float:
    """A behaviour with a price: the part of the turns that a task allows."""
    return episode.turns / 2


def remind(parsed: ParsedEpisode) -> Iterable[Hint]:
    """A detector that finds a mistake in every first turn."""
    if parsed.turns:
        yield Hint(0, "Reminder: call a tool.")


def get_config(base: str) -> ConfigDict:
    own = "tests.stages.two_hosts_config:"
    config = smollm2_135m.get_config("smoke")
    config.base = f"hf:{base}"
    config.stages = ("rl",)
    config.mesh.update({"cpu_devices": 8, "replica": 1, "data": 2, "expert": 4})
    config.model.update({"dispatch": "ring", "remat_saves": ()})
    config.tasks.families = {"bugs": f"{own}Bugs"}
    config.agent.system_prompt = ""
    config.agent.limits.update({"max_turns": 2, "max_turn_tokens": 8, "max_episode_tokens": 2 * ROW})
    config.agent.concurrency = 2
    config.sampler.update({"slots": 8, "max_model_len": ROW, "decode_steps": 4, "prefill_shapes": ((2, 128),)})
    config.sft.update({"steps": 2, "batch_size": 8, "seq_len": ROW, "save_every": 2})
    config.sft.sources = {"answers": {"kind": f"{own}Answers", "options": {"count": 64}}}
    config.rl.update({"steps": 3, "group_size": 4, "batches": ((ROW, 8),), "save_every": 2, "max_staleness": 1})
    config.rl.deterministic = True
    config.rl.groups.bugs = 1
    config.rl.algorithm.update({"name": f"{own}FixedBaseline", "options": {}})
    config.rl.algorithm.kl.coefficient = 0.01
    config.rl.reward.behaviors = {"turns": f"{own}turns"}
    config.rl.reward.penalties = {"turns": 0.1}
    config.rl.feedback.update({"weight": 0.5, "detectors": (f"{own}remind",)})
    config.rl.replay.fraction = 0.25
    config.rl.optimizer.peak = 1e-2
    config.evaluate.suites = {"bugs": {"family": "bugs", "tasks": 2, "attempts": 2, "compaction": "none"}}
    config.evaluate.every = {"bugs": 2}
    config.evaluate.headline = ("bugs",)
    return config
