"""Ways in which process 0 can tell another process what to do: `python -m benchmarks.command_channel`.

Starts two processes of four CPU devices on this machine, and one of eight. Prints, as the last line of stdout, one JSON
object of medians in milliseconds:
    connection         one way of a command of 2 kB (parallel/command_channel.py)
    key_value_store    one way of 2 kB through the coordinator's key-value store
    broadcast          multihost_utils.broadcast_one_to_all of 2 kB
    decode_call        {mesh: [one process, two processes]} of a tiny network, results fetched; one row in each engine
"""

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

REPEATS = 100
PAYLOAD = np.arange(500, dtype=np.int32)
MESHES = {"replica=8": dict(replica=8), "data=2, expert=4": dict(data=2, expert=4)}
WARM_UP = 10


def median_ms(call: Callable[[int], object], trips: int = 1) -> float:
    """Median of REPEATS calls, divided by the one-way trips of each."""
    seconds = []
    for number in range(REPEATS + WARM_UP):
        started = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - started)
    return round(1e3 * statistics.median(seconds[WARM_UP:]) / trips, 3)


def measure_channels(first: bool) -> dict[str, float]:
    """Round trips between the two processes, and a broadcast."""
    from jax.experimental import multihost_utils

    from composer_jax.parallel.command_channel import CommandReceiver, CommandSender
    from composer_jax.parallel.processes import coordinator_client

    results: dict[str, float] = {}
    client = coordinator_client()
    if first:
        sender = CommandSender(print)
        sender.connect()
        results["connection"] = median_ms(lambda _: (sender.send({}, [PAYLOAD]), sender.collect()), 2)
        sender.close()
    else:
        with CommandReceiver() as receiver:
            for header, arrays in receiver:
                receiver.reply(header, arrays)

    def ping_pong(number: int) -> None:
        keys = f"ping/{number}", f"pong/{number}"
        if first:
            client.key_value_set_bytes(keys[0], PAYLOAD.tobytes())
            client.blocking_key_value_get_bytes(keys[1], 60_000)
        else:
            client.blocking_key_value_get_bytes(keys[0], 60_000)
            client.key_value_set_bytes(keys[1], PAYLOAD.tobytes())

    results["key_value_store"] = median_ms(ping_pong, 2)
    results["broadcast"] = median_ms(lambda _: multihost_utils.broadcast_one_to_all(PAYLOAD))
    return results


def measure_decode(first: bool) -> dict[str, float]:
    """Decode calls of a sampler on each mesh, over all processes."""
    from composer_jax.data.chat.sampling_params import SamplingParams
    from composer_jax.models.config import ModelConfig
    from composer_jax.models.model_def import ModelDef
    from composer_jax.parallel.mesh import make_mesh
    from composer_jax.sampler.config import SamplerConfig
    from composer_jax.sampler.request import Request
    from composer_jax.sampler.sampler import Sampler

    definition = ModelDef(ModelConfig(**TINY))
    results = {}
    for name, sizes in MESHES.items():
        mesh = make_mesh(jax.devices(), **sizes)
        config = SamplerConfig(slots=8, max_model_len=512, decode_steps=4, prefill_shapes=((1, 8),))
        sampler = Sampler(definition, mesh, config, end_tokens=())
        sampler.update(*definition.init(0, mesh), version=0)
        sampler.warm_up()
        if not first:
            sampler.follow()
            continue

        async def seconds_per_call(sampler: Sampler = sampler) -> float:
            async with sampler.serving():
                for repeats in (WARM_UP, REPEATS):
                    request = Request((1, 2, 3), SamplingParams(4 * repeats))
                    started = time.perf_counter()
                    await asyncio.gather(*(sampler.submit(request) for _ in sampler.engines))
                return (time.perf_counter() - started) / REPEATS

        results[name] = round(1e3 * asyncio.run(seconds_per_call()), 2)
    return results


TINY: dict[str, Any] = dict(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_dense_layers=1,
    n_heads=2,
    kv_lora_rank=16,
    qk_nope_dim=8,
    qk_rope_dim=8,
    v_head_dim=8,
    dense_ff_dim=32,
    expert_ff_dim=16,
    n_experts=8,
    experts_per_token=2,
    n_shared_experts=1,
    max_context=512,
    n_mtp_modules=0,
    embedding_taps=0,
    dispatch="ring",
)


def run_process(address: str, process: int, processes: int) -> None:
    """One of the processes that `main` starts; process 0 prints its results."""
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    if processes > 1:
        from composer_jax.parallel.processes import join_processes

        join_processes(address, processes, process)
    results: dict[str, Any] = measure_channels(process == 0) if processes > 1 else {}
    results["decode_call"] = measure_decode(process == 0)
    if process == 0:
        print(json.dumps(results), flush=True)


def start(processes: int) -> dict[str, Any]:
    """The results of so many processes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    # Two threads per device, as in parallel/platform.py.
    env = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "16"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.command_channel", address, str(process), str(processes)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in started]
    assert not any(process.returncode for process in started), "a process failed; its error is above"
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    one, two = start(1), start(2)
    two["decode_call"] = {name: [one["decode_call"][name], ms] for name, ms in two["decode_call"].items()}
    print(json.dumps(two))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
