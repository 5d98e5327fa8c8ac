"""A step's batches from process 0 to four processes: `python -m benchmarks.step_batches [--tokens=N]`.

Makes episodes of N tokens whose routes have the size of Kimi K2.5's (60 layers, 8 of 384 experts), packs them into
batches and sends each of four processes of this machine its rows, over TCP (train/batch_parts.py,
parallel/command_channel.py). The last line of stdout is one JSON object:
    tokens, bytes             of the batches, padding included
    seconds                   from the first row to the last process that has its part
    seconds_per_mtoken        the same for a million tokens
    cpu_s                     CPU seconds of the process that sends, and of the four that receive, for N tokens
    send_gb_s                 bytes over the CPU seconds of the process that sends
    receive_gb_s              the same of the receivers, mean
    memory_over_part          peak memory of a receiver beyond what it had before, over its part of the step (it holds
                              one batch of two at a time); largest of four
    sender_memory             peak memory of the sender beyond the episodes, bytes
    overhead                  bytes on the wire over those of the arrays, minus 1
    stored_s, loaded_s        seconds of a group of N tokens to a file in memory and back (rl/played_group.py)
    compression               {what: {level: [size, GB/s in, GB/s out]}} of zstd, which frames do without
"""

import argparse
import json
import multiprocessing
import resource
import socket
import time
from typing import Any

import jax
import numpy as np
import psutil
import zstandard

from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import Transcript
from composer_jax.data.host_batch import Block
from composer_jax.parallel import command_channel
from composer_jax.parallel.command_channel import receive_frame, send_buffers
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl.batch import PackedRows, WeightedRow, pack_rows
from composer_jax.rl.played_group import PlayedGroup, decode_group, encode_group
from composer_jax.train import batch_parts
from composer_jax.train.batch_parts import BatchPartReader, part_frames

LAYERS, EXPERTS_PER_TOKEN, EXPERTS = 60, 8, 384
PROCESSES, ROWS = 4, 8
BATCHES = 2
"""Of a step."""


def blocks_of(mesh: Any, process: int, name: str, shape: tuple[int, ...]) -> list[Block]:
    """process_blocks of four processes of one device each, which this process does not have."""
    rows = shape[0] // PROCESSES
    return [(slice(process * rows, (process + 1) * rows), slice(0, shape[1]))]


def make_episode(tokens: int, seed: int) -> Episode:
    """An episode of one prompt and answers of 500 tokens, with routes."""
    rng, transcript = np.random.default_rng(seed), Transcript()
    transcript.append("prompt", rng.integers(0, 160_000, tokens % 500 + 500))
    while transcript.total_tokens < tokens:
        ids = rng.integers(0, 160_000, 500)
        transcript.append("assistant", [], ids, -rng.exponential(0.3, 500), [0] * 500)
    for node in transcript.nodes:
        shape = (len(node.tokens), LAYERS, EXPERTS_PER_TOKEN)
        transcript._routes[node.id] = rng.integers(0, EXPERTS, shape, np.uint16)
    return Episode("task", "made up", "train", seed, transcript, 1.0, "finished")


def pack(episodes: list[Episode]) -> PackedRows:
    """Batches of ROWS rows, each of one episode."""
    rows = [WeightedRow.of(row, 1.0) for episode in episodes for row in episode.transcript.rows()]
    length = max(len(row.row.tokens) for row in rows)
    return pack_rows(rows, ((length, ROWS),), route_shape=(LAYERS, EXPERTS_PER_TOKEN), n_experts=EXPERTS)


def peak() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def receive(process: int, port: int, results: Any) -> None:
    """One process: puts its parts together, one at a time."""
    batch_parts.process_blocks, batch_parts.process_index = blocks_of, lambda: process
    reader, parts, part_bytes = BatchPartReader(make_mesh(jax.devices()[:1])), 0, 0
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(bytes([process]))
    before = psutil.Process().memory_info().rss
    cpu = time.process_time()
    while (frame := receive_frame(connection)) is not None:
        header, arrays = frame
        if "part" in header:
            reader.add(header["part"], arrays)
            part_bytes += sum(array.nbytes for array in arrays)
        else:
            parts += len(reader.take()) > 0
            connection.sendall(b"1")
    cpu = time.process_time() - cpu
    results.put({"bytes": part_bytes, "parts": parts, "memory": peak() - before, "cpu_s": cpu})


def send(packed: PackedRows, connections: list[socket.socket]) -> dict[str, float]:
    """Process 0: sends every batch and waits until all processes have it."""
    mesh, sent = make_mesh(jax.devices()[:1]), 0
    cpu, started = time.process_time(), time.perf_counter()
    for batch in packed.batches:
        for process, connection in enumerate(connections):
            for header, arrays in part_frames(batch, mesh, process):
                buffers = command_channel.frame_buffers({"part": header}, arrays)
                sent += sum(map(len, buffers))
                send_buffers(connection, buffers)
            send_buffers(connection, command_channel.frame_buffers({"device_call": "gradient"}))
    for connection in connections:
        for _ in packed.batches:
            connection.recv(1)
    return {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu, "sent": sent}


def measure(tokens: int) -> dict[str, Any]:
    """Sends a step to four processes; see the module's docstring."""
    batch_parts.process_blocks = blocks_of
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        results = context.Queue()
        arguments = (server.getsockname()[1], results)
        receivers = [context.Process(target=receive, args=(process, *arguments)) for process in range(PROCESSES)]
        for receiver in receivers:
            receiver.start()
        by_process = {}
        for _ in receivers:
            connection, _ = server.accept()
            by_process[connection.recv(1)[0]] = connection
        connections = [by_process[process] for process in range(PROCESSES)]
        count = ROWS * BATCHES
        packed = pack([make_episode(tokens // count, seed) for seed in range(count)])
        before = psutil.Process().memory_info().rss
        of_sender = send(packed, connections)
        memory = peak() - before
        for connection in connections:
            connection.close()
        of_receivers = [results.get(timeout=600) for _ in receivers]
        for receiver in receivers:
            receiver.join()
    places = sum(batch["tokens"].size for batch in packed.batches)
    total = sum(one["bytes"] for one in of_receivers)
    return {
        "tokens": places,
        "bytes": total,
        "seconds": round(of_sender["seconds"], 3),
        "seconds_per_mtoken": round(of_sender["seconds"] * 1e6 / places, 3),
        "cpu_s": [round(of_sender["cpu_s"], 3), round(sum(one["cpu_s"] for one in of_receivers), 3)],
        "send_gb_s": round(total / of_sender["cpu_s"] / 1e9, 3),
        "receive_gb_s": round(total / sum(one["cpu_s"] for one in of_receivers) / 1e9, 3),
        "memory_over_part": round(max(one["memory"] / one["bytes"] for one in of_receivers), 3),
        "sender_memory": memory,
        "overhead": round(of_sender["sent"] / total - 1, 5),
    }


def measure_file(tokens: int) -> dict[str, float]:
    """Writes and reads a group."""
    group = PlayedGroup(0, [make_episode(tokens // 4, seed) for seed in range(4)], 0, 0)
    started = time.perf_counter()
    data = b"".join(encode_group(group))
    stored = time.perf_counter() - started
    decode_group(PlayedGroup, data)
    return {"stored_s": round(stored, 3), "loaded_s": round(time.perf_counter() - started - stored, 3)}


def measure_compression(tokens: int) -> dict[str, dict[int, list[float]]]:
    """Size and speeds of zstd for routes whose experts are as unequally busy as 1/sqrt(rank), and for token ids."""
    rng, odds = np.random.default_rng(0), np.arange(1, EXPERTS + 1) ** -0.5
    chosen = [rng.permutation(EXPERTS)[rng.choice(EXPERTS, (tokens, 8), p=odds / odds.sum())] for _ in range(LAYERS)]
    contents = {
        "routes": np.stack(chosen, 1).astype(np.uint16).tobytes(),
        "tokens": np.minimum(rng.zipf(1.3, 10 * tokens), 160_000).astype(np.int32).tobytes(),
    }
    result: dict[str, dict[int, list[float]]] = {}
    for name, content in contents.items():
        for level in (1, 3):
            times = [time.process_time()]
            data = zstandard.ZstdCompressor(level).compress(content)
            times.append(time.process_time())
            zstandard.ZstdDecompressor().decompress(data)
            speeds = [round(len(content) / 1e9 / max(s, 1e-9), 2) for s in np.diff([*times, time.process_time()])]
            result.setdefault(name, {})[level] = [round(len(data) / len(content), 3), *speeds]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    tokens = parser.parse_args().tokens
    result = measure(tokens) | measure_file(tokens) | {"compression": measure_compression(min(tokens, 40_000))}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
