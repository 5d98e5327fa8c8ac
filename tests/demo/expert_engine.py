"""A small run whose simulated users are answered by a network, or by experts in the network's place."""

import random

from composer_jax.checkpoint.checkpoint import describe_versions
from composer_jax.checkpoint.weight_chain import WeightPublisher
from composer_jax.checkpoint.weight_shards import published_shards
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.demo.traffic_traces import TrafficExpert
from composer_jax.models.model_def import ModelDef
from composer_jax.stages.run import Run
from configs import tiny
from tests.serve.scripted_engine import ScriptedEngine
from tests.stages.smoke_config import NETWORK


def small_config():
    """tiny:traffic_smoke with a smaller network and without training."""
    config = tiny.get_config("traffic_smoke")
    config.model.update(NETWORK)
    config.mesh.replica = 2  # where there are eight devices, too
    config.model.init = "normal"  # compiles in no time
    config.stages = ("rl",)
    config.agent.limits.update({"max_turns": 12, "max_turn_tokens": 64})
    return config


def publish(run: Run, chain: str, version: int = 1) -> None:
    """Publishes the initial weights of a run as a version."""
    assert run.model.chat is not None, "writes the tokenizer's files"
    describe_versions(chain, ModelDef(run.config.stage_model("rl")), str(run.path))
    WeightPublisher(chain).publish(published_shards(*run.model.initial_weights()), version)


class ExpertEngine(ScriptedEngine):
    """An engine that samples what an expert of the session's task writes."""

    def __init__(self, users, tokenizer, end_tokens, *, asks=0.0, malformed=0.0, version=1):
        super().__init__(None, end_tokens, max_model_len=640)
        self.version = version
        self._users, self._tokenizer, self._rates = users, tokenizer, (asks, malformed)
        self._experts = {}

    def submit(self, request):
        session = request.group
        if list(request.tokens).count(self._tokenizer.assistant) == 1:  # the first request
            cycle, number = map(int, session.split("-")[:2])
            task = self._users.task(cycle, number)
            self._experts[session] = TrafficExpert(task, self._tokenizer, random.Random(number), *self._rates)
        answer = self._experts[session].sample(list(request.tokens), SamplingParams(request.params.max_tokens))
        try:
            answer.send(None)
        except StopIteration as end:
            tokens = end.value.tokens
            self.write = lambda context: tokens
        return super().submit(request)
