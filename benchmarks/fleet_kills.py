"""Learner, engines and workers of a small run are killed at random: a part of benchmarks.fleet.

launch.rl learns from two engines (launch.serve) and two workers (launch.worker) deterministically, first without a
disturbance. Then the same run is repeated in another folder, where one process after another is killed with SIGKILL and
started again. Between the learner and each engine is a relay that knows which message is asked for how often.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.compare_workdirs import last_step, read_checkpoint
from benchmarks.fleet_relay import relaying
from composer_jax.rl.workers.handshake import make_token

CONFIG = "tests/stages/fleet_config.py"
ENGINES, WORKERS = 2, 2
SIZES = ("--slots=4", "--max_model_len=512", "--return_routed_experts")
"""Of an engine: those of CONFIG."""
POLL_S = 0.05
LONGEST_DELAY_S = 2.0
"""Seconds after the progress at which a kill is due, at most: a step of the learner is shorter."""
TOLERANCE = 1e-5
"""Largest relative difference of a weight: log-probabilities of a message that is sampled again differ by rounding."""

Message = tuple[int, int, int]
"""Seed of the session, branch, tokens of the context."""


class MessageLog:
    """Which messages the learner has asked engines for. kills: so far; a message belongs to the time after the last."""

    def __init__(self) -> None:
        self.kills = 0
        self.asked: Counter[Message] = Counter()
        self.again: Counter[tuple[int, int]] = Counter()
        """(kills before, seed) -> messages that were asked for before."""
        self._opening: dict[tuple[int, int, int], int] = {}
        self._seeds: dict[tuple[int, int, int], int] = {}

    def note(self, engine: int, connection: int, is_of_learner: bool, header: dict[str, Any], n: int) -> None:
        """Watches the relay of an engine (fleet_relay.Watch)."""
        if is_of_learner and header.get("method") == "open":
            self._opening[engine, connection, header["call"]] = header["body"]["seed"]
        elif not is_of_learner and (engine, connection, header.get("reply")) in self._opening:
            seed = self._opening.pop((engine, connection, header["reply"]))
            if "body" in header:
                self._seeds[engine, connection, header["body"]["session"]] = seed
        elif is_of_learner and header.get("method") == "sample":
            self._note_message(engine, connection, header["body"], header["arrays"][0][1][0])

    def _note_message(self, engine: int, connection: int, body: dict[str, Any], new_tokens: int) -> None:
        if body["params"]["prompt_logprobs"]:
            return  # of the weight check
        seed = self._seeds[engine, connection, body["session"]]
        message = seed, body["branch"], body["start"] + new_tokens
        if self.asked[message]:
            self.again[self.kills, seed] += 1
        self.asked[message] += 1


@dataclasses.dataclass
class FleetOfProcesses:
    """The processes of one run in a folder, by name."""

    folder: Path
    steps: int
    log: MessageLog = dataclasses.field(default_factory=MessageLog)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        make_token(self.folder / "token")
        self.run = self.folder / "run"
        self._ports, self._listen = [_free_port() for _ in range(ENGINES)], _free_port()
        self._relays: list[int] = []
        self._running: dict[str, subprocess.Popen] = {}
        self.names = ["learner", *(f"engine{i}" for i in range(ENGINES)), *(f"worker{i}" for i in range(WORKERS))]

    @contextlib.asynccontextmanager
    async def running(self):
        """Relays and processes run inside the block."""
        async with contextlib.AsyncExitStack() as stack:
            for number, port in enumerate(self._ports):
                watch = lambda *frame, number=number: self.log.note(number, *frame)  # noqa: E731
                self._relays.append(await stack.enter_async_context(relaying(0, port, watch)))
            try:
                for name in self.names:
                    self.start(name)
                yield self
            finally:
                for name in self._running:
                    self.kill(name)

    def start(self, name: str) -> None:
        """Starts a process, whose output is added to a file."""
        command = [sys.executable, "-m", *self._command(name)]
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "cache"), "JAX_PLATFORMS": "cpu"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command, cwd=Path(__file__).parents[1], env=env, stdout=log, stderr=log, start_new_session=True
            )

    def _command(self, name: str) -> list[str]:
        token, weights = f"--token_file={self.folder / 'token'}", self.folder / "weights"
        if name == "learner":
            engines = ",".join(f"127.0.0.1:{port}" for port in self._relays)
            fields = {"steps": self.steps, "save_every": 2, "engines": engines, "fleet.patience_s": 3600.0}
            flags = [f"--config.rl.{field}={value}" for field, value in fields.items()]
            flags += [f"--listen=127.0.0.1:{self._listen}", "--worker_patience=3600", token]
            return ["launch.rl", f"--config={CONFIG}:{weights}", f"--workdir={self.run}", *flags]
        if name.startswith("worker"):
            return ["launch.worker", f"--connect=127.0.0.1:{self._listen}", token, "--episodes=2"]
        port = self._ports[int(name.removeprefix("engine"))]
        return ["launch.serve", f"--checkpoint=patches:{weights}", f"--engine_port={port}", "--port=0", token, *SIZES]

    def kill(self, name: str) -> bool:
        """Kills a process and its children; returns whether it was at work."""
        process = self._running[name]
        was_running = process.poll() is None
        if was_running:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return was_running

    def has_ended(self) -> bool:
        """Returns whether the learner has ended well. Ends the program if a process failed."""
        for name, process in self._running.items():
            if (code := process.poll()) or (code is not None and name.startswith("engine")):
                raise SystemExit(f"{name} ended with {code}:\n{(self.folder / f'{name}.log').read_text()[-3000:]}")
        return self._running["learner"].poll() == 0

    async def wait_for(self, messages: int) -> bool:
        """Waits until so many different messages were asked for; returns whether the learner still runs."""
        while not (ended := self.has_ended()) and len(self.log.asked) < messages:
            await asyncio.sleep(POLL_S)
        return not ended


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


async def _measure(folder: Path, kills: int, steps: int, seed: int) -> dict[str, Any]:
    whole, killed = (FleetOfProcesses(folder / name, steps) for name in ("whole", "killed"))
    async with whole.running():
        await whole.wait_for(sys.maxsize)
    rng, victims, total = random.Random(seed), Counter[str](), len(whole.log.asked)
    async with killed.running():
        for number in range(kills):
            due = max(1, (number * total) // kills)
            if not await killed.wait_for(due):
                break
            await asyncio.sleep(rng.uniform(0, LONGEST_DELAY_S))
            name = rng.choice(killed.names)
            if killed.has_ended():
                break
            killed.log.kills += 1
            victims[name.rstrip("0123456789")] += killed.kill(name)
            killed.start(name)
        await killed.wait_for(sys.maxsize)
    return {"kills": victims.total(), "killed": dict(victims), **compare(whole, killed)}


def compare(whole: FleetOfProcesses, killed: FleetOfProcesses) -> dict[str, Any]:
    """Returns what differs between a run and one that was killed.

    lost: batches of the run that are missing or other ones, and groups that two batches have. sampled_again: messages;
    most_again: of one episode after one kill.
    """
    batches, others = (_batches(one.run) for one in (whole, killed))
    groups = Counter(group for batch in others for group in batch["groups"])
    lost = sum(one != other for one, other in zip(batches, others, strict=False)) + abs(len(batches) - len(others))
    difference = max(_weight_differences(whole.run, killed.run))
    missing = len(whole.log.asked.keys() ^ killed.log.asked.keys())
    return {
        "lost": lost + sum(count - 1 for count in groups.values()) + (difference > TOLERANCE),
        "steps": len(others),
        "weight_difference": float(f"{difference:.1e}"),
        "messages": len(whole.log.asked),
        "other_messages": missing,
        "sampled_again": killed.log.again.total(),
        "most_again": max(killed.log.again.values(), default=0),
    }


def _batches(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "batches.jsonl").read_text().splitlines()]


def _weight_differences(one: Path, other: Path) -> list[float]:
    folders = [run / "checkpoints" / "rl" for run in (one, other)]
    first, second = (read_checkpoint(folder / str(last_step(folder)))["params"] for folder in folders)
    return [
        float(abs(first[name] - second[name]).max() / max(abs(first[name]).max(), sys.float_info.min)) for name in first
    ]


def measure_kills(folder: Path, kills: int = 20, steps: int = 12, seed: int = 0) -> dict[str, Any]:
    """Returns {"kills", "lost", ...} of a run in a folder that must not exist yet; see `compare`."""
    folder.mkdir(parents=True)
    return asyncio.run(_measure(folder.absolute(), kills, steps, seed))
