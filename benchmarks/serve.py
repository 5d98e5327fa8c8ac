"""The server under load: `python -m benchmarks.serve [--clients=64] [--seconds=60]`.

Every client streams one completion after the other from a server on the same machine: 100
random tokens in, 64 out, of the demo's network with random weights. Prints progress on stderr and, as the last line of
stdout, one JSON object:
    clients, lost     clients, and requests that did not end with all of their tokens
    p50_ms, p99_ms    time between two events of a stream
    overhead          tokens per second of the engine alone, with the same requests, over those through the server, - 1
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import uvicorn

from benchmarks import conversations
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.chat.text_processor import FilesInMemory, TextProcessor
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import configure_cpu
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.request import Request
from composer_jax.sampler.sampler import Sampler
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from launch.huge_pages import restart_with_huge_pages

PROMPT, ANSWER = 100, 64


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def new_service(slots: int) -> Service:
    """Returns a server's engine with the demo's network and a small tokenizer."""
    model = conversations.model_config("demo")
    definition, mesh = ModelDef(model), make_mesh(jax.devices()[:1])
    tokenizer = Tokenizer.train([Path(__file__).read_text(encoding="utf-8")], 320)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder) / "tokenizer.json")
        files = {"tokenizer.json": (Path(folder) / "tokenizer.json").read_bytes()}
    text = TextProcessor(FilesInMemory(files, "demo"), model, "demo")
    config = SamplerConfig(slots=slots, max_model_len=512, prefill_shapes=((16, 64), (4, 256)))
    sampler = Sampler(definition, mesh, config, end_tokens=(), decode=text.tokenizer.decode)
    sampler.update(*definition.init(0, mesh), version=0, copy=False)
    sampler.warm_up(processed=True)
    return Service(sampler, text, ServerLimits())


def prompts(client: int, vocab_size: int) -> Any:
    """Yields the prompts of a client."""
    rng = np.random.default_rng(client)
    while True:
        yield rng.integers(16, vocab_size, PROMPT).tolist()


async def load_engine(sampler: Sampler, clients: int, seconds: float) -> float:
    """Returns the engine's tokens per second with as many requests at once as there are clients."""
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        for i, prompt in enumerate(prompts(number, 320)):
            if time.perf_counter() > end:
                return
            request = Request(prompt, SamplingParams(ANSWER), i)
            async for _ in sampler.submit(request):
                continue  # as the server, which takes every chunk

    async with sampler.serving():
        started, before = time.perf_counter(), sampler.decoded_tokens
        await asyncio.gather(*map(client, range(clients)))
        return (sampler.decoded_tokens - before) / (time.perf_counter() - started)


async def load_server(port: int, clients: int, seconds: float) -> dict[str, Any]:
    """Streams completions from a server; returns what the clients saw."""
    end, gaps, tokens, lost = time.perf_counter() + seconds, [], 0, 0

    async def client(number: int) -> None:
        nonlocal tokens, lost
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for i, prompt in enumerate(prompts(number, 320)):
            if time.perf_counter() > end:
                break
            body = {"prompt": prompt, "max_tokens": ANSWER, "seed": i, "stream": True, "return_token_ids": True}
            data = json.dumps(body).encode()
            writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode())
            writer.write(data)
            got, last = 0, 0.0
            while (line := await reader.readline()) and line != b"data: [DONE]\n":
                if line.startswith(b"data: "):
                    now = time.perf_counter()
                    if last:
                        gaps.append(now - last)
                    last = now
                    got += len(json.loads(line[6:])["choices"][0]["token_ids"])
            while line and line != b"0\r\n":  # the last chunk
                line = await reader.readline()
            await reader.readline()
            tokens += got
            lost += got != ANSWER
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*map(client, range(clients)))
    p50, p99 = np.percentile(gaps, (50, 99)) * 1e3
    rate = tokens / (time.perf_counter() - started)
    return {"lost": lost, "p50_ms": p50, "p99_ms": p99, "tokens_per_s": rate}


async def run_server(service: Service, clients: int, seconds: float) -> dict[str, Any]:
    """Starts the server, and the clients in a process of their own."""
    server = uvicorn.Server(uvicorn.Config(new_app(service), port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.serve", f"--port={port}", f"--clients={clients}"]
    process = await asyncio.create_subprocess_exec(*command, f"--seconds={seconds}", stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    server.should_exit = True
    await serving
    return json.loads(out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64, help="clients at once (default: 64)")
    parser.add_argument("--seconds", type=float, default=60, help="of load (default: 60)")
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)  # only the clients, for that server
    o = parser.parse_args(argv)

    if o.port:
        print(json.dumps(asyncio.run(load_server(o.port, o.clients, o.seconds))))
        return
    configure_cpu(1)
    service = new_service(o.clients)
    asyncio.run(load_engine(service.sampler, o.clients, 3))
    alone = [asyncio.run(load_engine(service.sampler, o.clients, o.seconds / 4))]
    note(f"the engine alone: {alone[0]:.0f} tokens/s")
    seen = asyncio.run(run_server(service, o.clients, o.seconds))
    note(f"through the server: {seen}")
    alone.append(asyncio.run(load_engine(service.sampler, o.clients, o.seconds / 4)))
    note(f"the engine alone: {alone[1]:.0f} tokens/s")
    figures = {"clients": o.clients, **seen, "overhead": sum(alone) / 2 / seen.pop("tokens_per_s") - 1}
    figures.pop("tokens_per_s")
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
