"""What writing traffic costs a server: `python -m benchmarks.traffic_serving [--pairs=9] [--seconds=7]`.

Clients hold sessions of three turns with a server on the same machine, without `--traffic` and with it in turn: 100
random tokens, 64 out, 32 more, 64 out, 32 more, 64 out, of the demo's network with random weights. Every user
consents. Prints progress on stderr, a table, and as the last line of stdout one JSON object:
    tokens_per_s    median over the pairs of tokens per second with traffic over those without
    p99             the same of the 99th percentile of the time between two events of a stream
    writer          median of the processor time of the writer's thread over that of the server's process
    turns, dropped  turns that were written, and sessions that were dropped
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from benchmarks.serve import new_service, note
from composer_jax.parallel.platform import configure_cpu
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from composer_jax.serve.traffic.writer import TrafficWriter
from launch.huge_pages import restart_with_huge_pages

FIRST, NEXT, ANSWER, TURNS = 100, 32, 64, 3
VOCABULARY = 320


async def hold_sessions(port: int, number: int, end: float, gaps: list[float]) -> int:
    """Holds sessions until `end`; returns the tokens that came until then, and adds the gaps between events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    rng, tokens, session = np.random.default_rng(number), 0, 0
    while time.perf_counter() < end:
        prompt, session = rng.integers(16, VOCABULARY, FIRST).tolist(), session + 1
        for turn in range(TURNS):
            if time.perf_counter() > end:
                break
            body = {"prompt": prompt, "max_tokens": ANSWER, "seed": turn, "stream": True, "return_token_ids": True}
            data = json.dumps(body).encode()
            named = f"x-session-id: {number}-{session}\r\nx-consent: training\r\nx-user-id: {number}\r\n"
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{named}content-length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            answer, last = [], 0.0
            while (line := await reader.readline()) and line != b"data: [DONE]\n":
                if line.startswith(b"data: "):
                    now = time.perf_counter()
                    gaps += [now - last] if last else []
                    last = now
                    part = json.loads(line[6:])["choices"][0]["token_ids"]
                    answer += part
                    tokens += len(part) if now < end else 0
            while line and line != b"0\r\n":  # the last chunk
                line = await reader.readline()
            await reader.readline()
            prompt = [*prompt, *answer, *rng.integers(16, VOCABULARY, NEXT).tolist()]
    writer.close()
    return tokens


async def load(port: int, clients: int, seconds: float) -> dict[str, float]:
    """Returns what clients see of a server."""
    gaps: list[float] = []
    started = time.perf_counter()
    tokens = await asyncio.gather(*(hold_sessions(port, i, started + seconds, gaps) for i in range(clients)))
    return {"tokens_per_s": sum(tokens) / seconds, "p99_ms": float(np.percentile(gaps, 99)) * 1e3}


async def measure(service: Service, clients: subprocess.Popen[str], seconds: float) -> dict[str, float]:
    """Starts the server for one run; the clients are a process of their own. The service ends with it."""
    server = uvicorn.Server(uvicorn.Config(new_app(service), port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    assert clients.stdin is not None and clients.stdout is not None
    port, before = server.servers[0].sockets[0].getsockname()[1], time.process_time()
    clients.stdin.write(f"{port} {seconds}\n")
    clients.stdin.flush()
    figures = json.loads(await asyncio.to_thread(clients.stdout.readline))
    server.should_exit = True
    await serving
    if service.traffic is not None:
        counts = service.traffic.counts
        share = service.traffic.thread_seconds / (time.process_time() - before)
        figures |= {"writer": share, "turns": counts.written_turns, "dropped": counts.dropped_sessions}
    return figures


def run_pairs(clients: int, pairs: int, seconds: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns (without traffic, with traffic) of each pair; which of the two runs first alternates."""
    base, rows = new_service(clients), []
    command = [sys.executable, "-m", "benchmarks.traffic_serving", f"--clients={clients}", "--load"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        policy = Path(folder) / "policy.json"
        policy.write_text('{"consent_text": "We measure this."}')

        def run(name: str) -> dict[str, Any]:
            traffic = TrafficWriter(Path(folder) / name, str(policy), base.text) if name else None
            service = Service(base.sampler, base.text, ServerLimits(), None, traffic)
            figures = asyncio.run(measure(service, process, seconds))
            note(f"{'with' if name else 'without'} traffic: {figures}")
            return figures

        run("warm")
        for i in range(pairs):
            first = run("" if i % 2 else f"run{i}")
            second = run(f"run{i}" if i % 2 else "")
            rows.append((first, second) if i % 2 else (second, first))
        assert process.stdin is not None
        process.stdin.close()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16, help="clients at once (default: 16)")
    parser.add_argument("--pairs", type=int, default=9, help="runs without traffic and with it (default: 9)")
    parser.add_argument("--seconds", type=float, default=7, help="of a run (default: 7)")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)  # the clients, for servers on stdin
    o = parser.parse_args(argv)

    if o.load:
        for line in sys.stdin:
            port, seconds = line.split()
            print(json.dumps(asyncio.run(load(int(port), o.clients, float(seconds)))), flush=True)
        return
    configure_cpu(1)
    rows = run_pairs(o.clients, o.pairs, o.seconds)
    median = lambda name: statistics.median(on[name] / off[name] for off, on in rows)  # noqa: E731
    print("| pair | tokens/s without | with | p99 ms without | with | writer |\n|---|---|---|---|---|---|")
    for i, (off, on) in enumerate(rows, 1):
        rates = f"{off['tokens_per_s']:.0f} | {on['tokens_per_s']:.0f}"
        print(f"| {i} | {rates} | {off['p99_ms']:.1f} | {on['p99_ms']:.1f} | {on['writer']:.2%} |")
    figures = {
        "tokens_per_s": round(median("tokens_per_s"), 4),
        "p99": round(median("p99_ms"), 4),
        "writer": round(statistics.median(on["writer"] for _, on in rows), 4),
        "turns": sum(on["turns"] for _, on in rows),
        "dropped": sum(on["dropped"] for _, on in rows),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
