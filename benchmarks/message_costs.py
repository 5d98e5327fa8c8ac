"""Host seconds of messages between a learner and an engine: `python -m benchmarks.message_costs [--tokens=A,B]`.

An engine process with scripted answers serves a FleetPolicy of this process over TCP, on the wire of rl.engines. Its
answers have routes of Kimi K2.5's size (60 layers, 8 of 384 experts). Sessions take turns: each message brings A (or B)
new tokens of which a third is sampled, and this process checks the answer and appends it to a transcript, as episodes
do. The last line of stdout is one JSON object:
    learner_ms, engine_ms   CPU milliseconds of a message in each process, by new tokens; 0: one token without routes
    message_s, bytes_per_s  the line through 0 and B of the learner: scale/message_costs.py has it as constants
    bytes                   of a message both ways, by new tokens, as scale/message_costs.py says
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from typing import Any

import numpy as np

from composer_jax.agent.transcript import Transcript
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.rl.engines.config import FleetConfig
from composer_jax.rl.engines.description import EngineDescription, EngineStatus, RequiredEngine
from composer_jax.rl.engines.engine_port import EnginePort, ServedEngine, bind_port
from composer_jax.rl.engines.fleet import FleetPolicy, Publishing
from composer_jax.sampler.policy import Sample
from composer_jax.sampler.weight_checksums import WeightChecksum
from composer_jax.scale.message_costs import reply_bytes, request_bytes

ROUTE_SHAPE, EXPERTS, VOCAB = (60, 8), 384, 160_000
CONTEXT, SLOTS, SESSIONS = 32_768, 128, 16
TOKEN = "a token of the benchmark"
CHECKSUMS = (WeightChecksum("w", "bfloat16", (3,), "0"),)
DESCRIPTION = EngineDescription("engine", "network", "tokenizer", (3,), CONTEXT, SLOTS, SLOTS, True, "folder")
ROUTES = np.random.default_rng(0).integers(0, EXPERTS, (CONTEXT, *ROUTE_SHAPE), np.uint16)


class ScriptedEngine:
    """A policy that has sampled already."""

    max_model_len = CONTEXT

    async def open(self, seed: int, *, ahead: bool = False) -> "ScriptedEngine":
        return self

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """A session holds nothing."""

    async def sample(self, context: Any, params: SamplingParams, branch: int = 0) -> Sample:
        n, start = params.max_tokens, params.routing_start
        routes = ROUTES[start : len(context) + n - 1] if params.return_routing else None
        return Sample(
            [5] * n, [-0.5] * n, [0] * n, "length", raw_logprobs=[-0.5] * n, routing=routes, routing_start=start
        )


def serve(connection: Any) -> None:
    """The engine's process: sends its port, and its CPU seconds whenever it is asked for them."""

    async def run() -> None:
        async def same() -> None:
            return None

        listening = bind_port("127.0.0.1", 0)
        listening.listen()
        engine = ServedEngine(ScriptedEngine(), DESCRIPTION, lambda: EngineStatus(0, CHECKSUMS), same, same)
        serving = asyncio.create_task(EnginePort(engine, TOKEN, listening).run())
        connection.send(listening.getsockname()[1])
        while await asyncio.to_thread(connection.recv):
            connection.send(time.process_time())
        serving.cancel()

    asyncio.run(run())


async def play(fleet: FleetPolicy, seed: int, messages: int, new: int) -> None:
    """Messages of one session: `new` tokens each, a third of them sampled; 0: one sampled token without routes."""
    session, transcript = await fleet.open(seed), Transcript()
    for _ in range(messages):
        sampled = max(1, new // 3)
        if transcript.length + new + 1 > CONTEXT:
            transcript = Transcript()
        observed = [7] * max(1, new - sampled)
        known = transcript.routes_known
        params = SamplingParams(sampled, return_routing=new > 0, routing_start=known if new else 0)
        sample = await session.sample([*transcript.tokens, *observed], params)
        transcript.append(
            "assistant",
            observed,
            sample.tokens,
            sample.logprobs,
            sample.versions,
            routes=sample.routing,
            routes_start=known,
        )
    session.close()


async def measure(port: int, connection: Any, messages: int, sizes: list[int]) -> dict[str, Any]:
    """Plays the messages of each size; see the module's docstring."""
    required = RequiredEngine("network", "tokenizer", (3,), CONTEXT, ROUTE_SHAPE, EXPERTS)
    fleet = FleetPolicy(
        [f"127.0.0.1:{port}"],
        TOKEN,
        required,
        FleetConfig(),
        Publishing(lambda *_: None, lambda: None),
        vocab_size=VOCAB,
        version=0,
        checksums=CHECKSUMS,
    )

    def clocks() -> np.ndarray:
        connection.send(True)
        return np.array([time.process_time(), connection.recv()])

    seconds = {}
    async with fleet.serving():
        await play(fleet, 0, 5, sizes[-1])  # warm caches
        for new in sizes:
            before = clocks()
            each = messages // SESSIONS
            await asyncio.gather(*(play(fleet, seed, each, new) for seed in range(SESSIONS)))
            seconds[new] = (clocks() - before) / (each * SESSIONS)
    width = 2 * int(np.prod(ROUTE_SHAPE))
    n_bytes = {new: request_bytes(new - new // 3) + reply_bytes(max(1, new // 3), new * width) for new in sizes}
    first, last = sizes[0], sizes[-1]
    rate = (n_bytes[last] - n_bytes[first]) / (seconds[last][0] - seconds[first][0])
    return {
        "learner_ms": {new: round(1000 * both[0], 3) for new, both in seconds.items()},
        "engine_ms": {new: round(1000 * both[1], 3) for new, both in seconds.items()},
        "message_s": round(seconds[first][0], 6),
        "bytes_per_s": round(rate),
        "bytes": n_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=640)
    parser.add_argument("--tokens", default="300,900")
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    engine.start()
    try:
        sizes = [0, *map(int, args.tokens.split(","))]
        result = asyncio.run(measure(ours.recv(), ours, args.messages, sizes))
    finally:
        ours.send(False)
        engine.join()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
