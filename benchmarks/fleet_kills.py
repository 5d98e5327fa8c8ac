"""Learner, engines and workers of a small run are killed while messages are sampled: a part of benchmarks.fleet.

launch.rl learns from two engines (launch.serve), of which the second has two processes with their own shards of the
weights, and two workers (launch.worker) deterministically, first without a disturbance. Then the same run is repeated
in another folder, where one process after another is killed with SIGKILL and started again: a process of an engine at a
moment when that engine owes a message, the learner or a worker when any engine does. Where one of the two processes of
an engine is killed, the other has to end by itself, and both are started again. Between the learner and each engine is
a relay that knows which message is asked for how often, and which one has no answer yet.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare_workdirs import last_step, read_checkpoint
from benchmarks.fleet_messages import MessageLog
from benchmarks.fleet_relay import relaying
from composer_jax.rl.workers.handshake import make_token

CONFIG = "tests/stages/fleet_config.py"
SIZES = ("--slots=4", "--max_model_len=512", "--return_routed_experts")
"""Of an engine: those of CONFIG."""
SHARDED = ("--data=2", "--slots=8")
"""Of the engine of two processes: the devices of each sample as many messages as the other engine, in equal shapes."""
ENGINES = {"engine0": (), "engine1": SHARDED}
"""Name of an engine and of its process 0 -> its further flags."""
PARTNERS = {"engine1": "second1", "second1": "engine1"}
"""Process of an engine of two processes -> the other one."""
PROCESSES = {"learner": "learner", "engine0": "engine", "engine1": "engine", "second1": "second process of an engine"}
PROCESSES |= {"worker0": "worker", "worker1": "worker"}
"""Name of a process -> how the row calls its kind."""
MESSAGE_TOKENS = 96
"""Most tokens of a message: enough device calls for a kill to meet one in the middle."""
POLL_S = 0.05
DUE = 0.6
"""Part of the messages after which the last kill is due: each comes later than it is due, and the run has to last."""
LONGEST_DELAY_S = 2.0
"""Seconds after the progress at which a kill is due, at most: a step of the learner is shorter."""
LONGEST_END_S = 60.0
"""Seconds in which an engine ends of which a process was killed; JAX by itself notices that after 100."""
TOLERANCE = 1e-5
"""Largest relative difference of a weight: log-probabilities of a message that is sampled again differ by rounding."""


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
        self._ports, self._listen = {engine: _free_port() for engine in ENGINES}, _free_port()
        self._coordinator = 0
        self._relays: list[int] = []
        self._running: dict[str, subprocess.Popen] = {}

    @contextlib.asynccontextmanager
    async def running(self):
        """Relays and processes run inside the block."""
        async with contextlib.AsyncExitStack() as stack:
            for engine, port in self._ports.items():
                watch = lambda *frame, engine=engine: self.log.note(engine, *frame)  # noqa: E731
                on_end = lambda connection, engine=engine: self.log.note_end(engine, connection)  # noqa: E731
                self._relays.append(await stack.enter_async_context(relaying(0, port, watch, on_end)))
            try:
                for name in PROCESSES:
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
            fields = {"rl.steps": self.steps, "rl.save_every": 2, "rl.engines": engines, "rl.fleet.patience_s": 3600.0}
            fields |= {"agent.limits.max_turn_tokens": MESSAGE_TOKENS}
            flags = [f"--config.{field}={value}" for field, value in fields.items()]
            flags += [f"--listen=127.0.0.1:{self._listen}", "--worker_patience=3600", token]
            return ["launch.rl", f"--config={CONFIG}:{weights}", f"--workdir={self.run}", *flags]
        if name.startswith("worker"):
            return ["launch.worker", f"--connect=127.0.0.1:{self._listen}", token, "--episodes=2"]
        engine = name if name in ENGINES else PARTNERS[name]
        flags = [f"--checkpoint=patches:{weights}", f"--engine_port={self._ports[engine]}", "--port=0", token, *SIZES]
        if name in PARTNERS:
            if name == engine:
                self._coordinator = _free_port()
            coordinator = f"--coordinator=127.0.0.1:{self._coordinator}"
            flags += [coordinator, "--processes=2", f"--process={int(name != engine)}"]
        return ["launch.serve", *flags, *ENGINES[engine]]

    def kill(self, name: str) -> None:
        """Kills a process and its children."""
        process = self._running[name]
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    async def replace(self, name: str) -> float:
        """Kills a process and starts it again; returns the seconds in which the other process of its engine ended.

        For an engine of one process it is 0. Ends the program if the other one goes on, or does not say why it ended.
        """
        partner, seconds = PARTNERS.get(name), 0.0
        output = self.folder / f"{partner}.log"
        said = output.stat().st_size if partner else 0
        self.kill(name)
        if partner is not None:
            seconds = await self._wait_for_end(partner)
            sentence = f"process {int(name not in ENGINES)} ended: it was killed"
            end = output.read_bytes()[said:].decode()
            if sentence not in end:
                raise SystemExit(f"{partner} has ended without {sentence!r}:\n{end[-3000:]}")
        for one in sorted(filter(None, (name, partner))):  # process 0 first, which chooses the port of the coordinator
            self.start(one)
        return seconds

    async def _wait_for_end(self, name: str) -> float:
        process, clock = self._running[name], asyncio.get_running_loop().time
        killed_at = clock()
        try:
            await asyncio.to_thread(process.wait, LONGEST_END_S)
        except subprocess.TimeoutExpired as error:
            raise SystemExit(f"{name} goes on for {LONGEST_END_S:g} s without the process that was killed") from error
        return clock() - killed_at

    def has_ended(self) -> bool:
        """Returns whether the learner has ended well. Ends the program if a process failed."""
        for name, process in self._running.items():
            if (code := process.poll()) or (code is not None and "engine" in PROCESSES[name]):
                raise SystemExit(f"{name} ended with {code}:\n{(self.folder / f'{name}.log').read_text()[-3000:]}")
        return self._running["learner"].poll() == 0

    async def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Waits until what is asked or owed meets a condition; returns whether the learner still runs."""
        while not (ended := self.has_ended()) and not condition():
            self.log.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self.log.changed.wait()
        return not ended


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Victims:
    """Draws processes whose kill meets a message that is being sampled; each as often as the others, if it can be."""

    def __init__(self, rng: random.Random, log: MessageLog) -> None:
        self._rng, self._log = rng, log
        self._left: list[str] = []

    def draw(self) -> str:
        """Returns the next process, of those of which a message is owed; call it while an engine owes one."""
        while (drawn := next((name for name in self._left if self._log.owes(engine_of(name))), None)) is None:
            self._left += self._rng.sample(list(PROCESSES), len(PROCESSES))
        self._left.remove(drawn)
        return drawn


def engine_of(name: str) -> str | None:
    """Returns the engine of a process; None for those that every engine's messages are for."""
    return name if name in ENGINES else PARTNERS.get(name)


async def _measure(folder: Path, kills: int, steps: int, seed: int) -> dict[str, Any]:
    whole, killed = (FleetOfProcesses(folder / name, steps) for name in ("whole", "killed"))
    async with whole.running():
        await whole.wait_for(lambda: False)
    if whole.log.again:
        raise SystemExit(f"messages were sampled again though nothing was killed: {whole.log.again}")
    rng, log, total = random.Random(seed), killed.log, len(whole.log.asked)
    victims, kinds, seconds = Victims(rng, log), [], []
    async with killed.running():
        for number in range(kills):
            due = max(1, round(DUE * number / kills * total))
            if not await killed.wait_for(lambda due=due: len(log.asked) >= due):
                break
            await asyncio.sleep(rng.uniform(0, LONGEST_DELAY_S))
            if not await killed.wait_for(log.owes):
                break
            name = victims.draw()
            log.kills += 1
            kinds.append(PROCESSES[name])
            seconds.append(await killed.replace(name))
        await killed.wait_for(lambda: False)
    result = {"kills": len(kinds), "killed": Counter(kinds), "longest_end_s": round(max(seconds, default=0), 1)}
    return result | compare(whole, killed, kinds)


def compare(whole: FleetOfProcesses, killed: FleetOfProcesses, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns what differs between a run and one that was killed.

    lost: batches of the run that are missing or other ones, and groups that two batches have. sampled_again: messages;
    met: kills after which there were any; most_again: of one episode after one kill, by the kind of that kill.

    Args:
      kinds: of the processes that were killed, in order.
    """
    batches, others = (_batches(one.run) for one in (whole, killed))
    groups = Counter(group for batch in others for group in batch["groups"])
    lost = sum(one != other for one, other in zip(batches, others, strict=False)) + abs(len(batches) - len(others))
    difference = max(_weight_differences(whole.run, killed.run))
    missing = len(whole.log.asked.keys() ^ killed.log.asked.keys())
    again = killed.log.again
    return {
        "lost": lost + sum(count - 1 for count in groups.values()) + (difference > TOLERANCE),
        "steps": len(others),
        "weight_difference": float(f"{difference:.1e}"),
        "messages": len(whole.log.asked),
        "other_messages": missing,
        "met": len({kill for kill, _ in again}),
        "sampled_again": again.total(),
        "most_again": {
            kind: max((n for (kill, _), n in again.items() if kinds[kill - 1] == kind), default=0)
            for kind in dict.fromkeys(kinds)
        },
    }


def _batches(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "batches.jsonl").read_text().splitlines()]


def _weight_differences(one: Path, other: Path) -> list[float]:
    folders = [run / "checkpoints" / "rl" for run in (one, other)]
    first, second = (read_checkpoint(folder / str(last_step(folder)))["params"] for folder in folders)
    return [
        float(abs(first[name] - second[name]).max() / max(abs(first[name]).max(), sys.float_info.min)) for name in first
    ]


def measure_kills(folder: Path, kills: int = 20, steps: int = 24, seed: int = 0) -> dict[str, Any]:
    """Returns {"kills", "lost", ...} of a run in a folder that must not exist yet; see `compare`."""
    folder.mkdir(parents=True)
    return asyncio.run(_measure(folder.absolute(), kills, steps, seed))
