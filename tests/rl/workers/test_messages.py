"""What travels between a trainer and its workers: every field, also those that are added later."""

import asyncio
import dataclasses
import json

from composer_jax.agent.episode import EpisodeLimits
from composer_jax.agent.summary import Compaction
from composer_jax.demo.bugfix import generate
from composer_jax.rl.effort import EffortConfig, EffortLevel
from composer_jax.rl.rollout import EpisodeSpec, RolloutContext
from composer_jax.rl.workers.messages import spec_from_json, spec_to_json
from composer_jax.rl.workers.worker_setup import WorkerSetup
from tests.rl.workers.seeded_policy import worker_setup

OF_THE_MACHINE = {"chat", "pool", "limits", "cache", "infrastructure_retries", "images"}
"""Fields of a RolloutContext that a worker makes, or that the trainer's WorkerPool decides."""


def differing_fields(a, b) -> set[str]:
    return {field.name for field in dataclasses.fields(a) if getattr(a, field.name) != getattr(b, field.name)}


def test_a_spec_arrives_with_every_field():
    task = generate("train", 0, 0)
    plain = EpisodeSpec(generate("train", 0, 1), 0, Compaction())
    spec = EpisodeSpec(task, 7, Compaction(trigger=300), group=3, effort="low")
    assert differing_fields(spec, plain) == {field.name for field in dataclasses.fields(EpisodeSpec)}
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_setup_arrives_with_every_field_and_fills_every_field_of_the_context(tmp_path):
    """A field that the setup loses has its default in the context of the worker, which differs from this one."""
    setup = worker_setup(
        tmp_path,
        limits=EpisodeLimits(max_turns=3),
        system_prompt="Be brief.",
        effort=EffortConfig({"low": EffortLevel(10, 2.0)}, "{level}!"),
        temperature=0.5,
        episode_seconds=9.0,
        return_routing=True,
    )
    received = WorkerSetup.from_json(json.loads(json.dumps(setup.to_json())))
    assert received == setup

    async def context_of_worker() -> RolloutContext:
        async with received.rollout_context(1) as context:
            return context

    context = asyncio.run(context_of_worker())
    travelling = {field.name: field for field in dataclasses.fields(RolloutContext) if field.name not in OF_THE_MACHINE}
    for name, field in travelling.items():
        assert getattr(context, name) == getattr(setup, name) != field.default, name
    assert context.limits == setup.limits
