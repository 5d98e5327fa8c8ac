"""A small run that learns from traffic: its config, and sessions as a batch has them, sampled by its first version."""

import dataclasses
import itertools
from pathlib import Path

from ml_collections import ConfigDict

from composer_jax.agent.episode import Episode
from composer_jax.realtime.batches.store import TrafficBatch
from composer_jax.realtime.release.releases import Release
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.played_group import PlayedGroup
from composer_jax.stages.run import Run
from composer_jax.stages.simulated_groups import play_simulated, reserve_groups
from tests.stages import periodic_config
from tests.stages.base_model import write_base


def get_config(folder: str) -> ConfigDict:
    """folder: of the base in FOLDER/model, which is written if it is missing; FOLDER/weights gets the versions."""
    if not (Path(folder) / "model").exists():
        write_base(Path(folder) / "model")
    config = periodic_config.get_config(f"{folder}/model")
    config.rl.update({"max_staleness": 0, "publish": f"{folder}/weights"})
    config.rl.feedback.weight = 0.0
    config.rl.algorithm.kl.coefficient = 0.0
    config.rl.optimizer.update({"warmup": 0, "peak": 1e-3})
    config.evaluate.suites.bugs.update({"tasks": 4, "attempts": 2})
    config.traffic.update({"minibatch_sessions": 4, "simulated_fraction": 0.75, "kl_limit": 10.0})
    config.traffic.gate.margin = 0.9
    return config


def sample_sessions(run: Run, scratch: Path, count: int) -> list[PlayedGroup]:
    """Returns sessions of one episode each, with advantages, that the weights before RL have sampled."""
    run.services.prepare_updates()
    sampler = run.services.sampler_with(*run.model.weights_before("rl"), version=0)
    with RolloutLedger(scratch) as ledger:
        size = run.config.rl.group_size
        source, numbers = reserve_groups(run, ledger, 0, -(-count // size))
        play_simulated(run, ledger, source, [numbers], sampler)
        episodes = [episode for number in numbers for episode in ledger.load(number).episodes]
    signs = itertools.cycle((1.0, -0.5))
    return [
        PlayedGroup(i, [with_advantage(episode, sign)], 0, 0)
        for i, (episode, sign) in enumerate(zip(episodes[:count], signs, strict=False))
    ]


def with_advantage(episode: Episode, advantage: float) -> Episode:
    """Returns an episode as a session whose answers all have one advantage."""
    given = (advantage,) * len(episode.transcript.trained_spans())
    return dataclasses.replace(episode, family="", advantages=given, reward=advantage)


def batch_of(release: Release, sessions: list[PlayedGroup], **other: object) -> TrafficBatch:
    """Returns a batch of a release; `other` fields of the manifest replace the release's."""
    return TrafficBatch(
        {"release": release.number, "chain": release.chain, "anchor": release.anchor, **other}, sessions
    )
