"""One of several processes that have eight devices together and serve together.

python -m tests.sampler.serving_process ADDRESS PROCESS conversations OUT PROCESSES
    Process 0 writes the conversations on the meshes for so many processes to the file OUT.
python -m tests.sampler.serving_process ADDRESS PROCESS forever idle|busy PROCESSES
    Serves until it is killed; with `idle`, without a device call.
"""

import asyncio
import dataclasses
import json
import sys

import jax
import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import MeshConfig, make_mesh
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.policy import Sample
from composer_jax.sampler.request import Request
from tests.models.small import random_weights
from tests.sampler.conversations import CONFIG, END, Branch, converse

MODEL = ModelDef(dataclasses.replace(CONFIG, dispatch="ring", cache_routing=True))
SEEDS = range(300, 309)
"""Of more conversations than the sampler has slots."""
MESHES = {
    2: {
        "experts over both processes": (dict(data=2, expert=4), {}),
        "an engine in each process, drafts, processed probabilities": (
            dict(replica=2, expert=2, tensor=2),
            dict(drafts="prompt_lookup", draft_tokens=2, page_size=4),
        ),
        "another mesh than that of the weights": (
            dict(data=4, expert=2),
            dict(mesh=MeshConfig(replica=1, expert=2, tensor=2, data=2)),
        ),
    },
    4: {
        "two engines of two processes each, another mesh than that of the weights": (
            dict(data=4, expert=2),
            dict(mesh=MeshConfig(replica=2, expert=2, tensor=2)),
        ),
    },
}
"""By the number of processes."""


def make_weights(mesh, seed: int):
    """Random (params, router_bias) on a mesh of all devices of all processes."""
    from composer_jax.parallel.processes import device_put_global

    weights, shardings = random_weights(MODEL.config, seed), MODEL.shardings(mesh)
    return jax.tree.map(lambda array, to: device_put_global(np.asarray(array), to), weights, shardings)


def make_sampler(sizes, changes):
    """(sampler with weights of version 3, weights of version 4)."""
    from composer_jax.sampler.sampler import Sampler

    mesh = make_mesh(**sizes)
    config = SamplerConfig(**(dict(slots=8, max_model_len=64, decode_steps=4, prefill_shapes=((2, 8),)) | changes))
    sampler = Sampler(MODEL, mesh, config, end_tokens=(END,))
    sampler.update(*make_weights(mesh, 0), version=3)
    return sampler, make_weights(mesh, 1)


async def cancel_one(sampler) -> None:
    """Begins a long message and cancels it after its first tokens."""
    handle = sampler.submit(Request(tuple(range(1, 20)), SamplingParams(40), 11))
    await anext(aiter(handle))
    handle.cancel()


async def serve(sampler, weights) -> tuple[list[list[Branch]], Sample, list[Sample]]:
    """Conversations of two turns, before and after new weights, with a cancelled request; a sample with everything;
    and samples with the routes from some token on."""
    async with sampler.serving():
        first = [converse(sampler, seed, turns=2, branches=1) for seed in SEEDS]
        *conversations, _ = await asyncio.gather(*first, cancel_one(sampler))
        everything = SamplingParams(
            6, temperature=0.7, top_k=5, top_logprobs=2, prompt_logprobs=True, return_routing=True
        )
        sample = await sampler.submit(Request((3, 9, 14), everything, 5))
        tails = [SamplingParams(5 + start % 2, return_routing=True, routing_start=start) for start in range(4)]
        asked = [sampler.submit(Request((3, 9, 14, seed), tails[seed % 4], seed)) for seed in range(16)]
        routed = await asyncio.gather(*asked)  # more than one of most shards
        await sampler.update_serving(*weights, version=4)
        later = [converse(sampler, seed, turns=2, branches=1) for seed in SEEDS[:2]]
        conversations += await asyncio.gather(*later)
    return conversations, sample, routed


async def serve_again(sampler) -> list[Sample]:
    """Samples of the last engine, one after another, each in the pages of the one before."""
    samples = []
    async with sampler.serving():
        for seed in range(6):
            sampler.reset_prefix_cache()
            samples.append(await sampler.engines[-1].submit(Request(tuple(range(1, 18)), SamplingParams(20), seed)))
    return samples


def play(first_process: bool, count: int) -> dict[str, dict]:
    """What `serve` returns on every mesh for so many processes, and `serve_again` before and after a release, as plain
    JSON; nothing in a process that follows."""
    results = {}
    for name, (sizes, changes) in MESHES[count].items():
        sampler, weights = make_sampler(sizes, changes)
        if first_process:
            conversations, sample, routed = asyncio.run(asyncio.wait_for(serve(sampler, weights), 300))
            again = asyncio.run(asyncio.wait_for(serve_again(sampler), 300))
            sampler.release()
            sampler.update(*weights, version=5)
            again += asyncio.run(asyncio.wait_for(serve_again(sampler), 300))
            branches = [*(branch for conversation in conversations for branch in conversation), *again]
            results[name] = {
                "tokens": [branch.tokens for branch in branches] + [sample.tokens],
                "logprobs": [branch.logprobs for branch in branches] + [sample.logprobs],
                "likeliest": [list(top) for top in sample.top_logprobs],
                "top_logprobs": [list(top.values()) for top in sample.top_logprobs],
                "prompt_logprobs": [sample.prompt.logprobs[1:]],
                "routing": [sample.routing.tolist(), *[one.routing.tolist() for one in routed]],
            }
        else:
            sampler.follow(lambda version, weights=weights: {4: weights}[version])
            assert sampler.version == 4
            sampler.follow()
            sampler.release()
            sampler.update(*weights, version=5)
            sampler.follow()
    return results


async def serve_forever(sampler, idle: bool) -> None:
    async with sampler.serving():
        print("serving", flush=True)
        if idle:
            await asyncio.get_running_loop().create_future()
        for seed in range(1_000_000):
            await sampler.submit(Request((3, 9, 14), SamplingParams(40), seed))
            if seed == 3:
                print("sampling", flush=True)


def run(process: int, task: str, option: str, count: int) -> None:
    if task == "conversations":
        results = play(process == 0, count)
        if process == 0:
            with open(option, "w") as file:
                json.dump(results, file)
        return
    sampler, _ = make_sampler(dict(data=2, expert=4), {})
    if process == 0:
        asyncio.run(serve_forever(sampler, option == "idle"))
    else:
        sampler.follow()


def main(address: str, process: str, task: str, option: str, count: str) -> None:
    from composer_jax.parallel import failure, processes
    from launch import hosts
    from launch.exit_codes import exit_reason

    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    processes.join_processes(address, int(count), int(process))
    finish = failure.watch_for_failures("prog")
    try:
        run(int(process), task, option, int(count))
        finish()
    except BaseException as error:  # as launch/flags.py does
        hosts.abort(error, "prog", exit_reason(error, "prog", has_workdir=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
