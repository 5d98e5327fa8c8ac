"""RL whose engines are processes of their own: the tokens of a run that samples by itself, also when one is killed."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from composer_jax.checkpoint.weight_chain import WeightReceiver
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop
from composer_jax.observe.metrics import read_metrics
from composer_jax.rl.engines.description import EngineDescription
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.workers.handshake import make_token
from composer_jax.rl.workers.pool import PoolOptions
from composer_jax.rl.workers.ray_cluster import RayCluster
from composer_jax.stages import train_rl as rl_stage
from composer_jax.stages.fleet import check_engines, open_fleet, required_engine
from composer_jax.stages.rollout_workers import RolloutWorkersOptions
from composer_jax.stages.run import Run
from composer_jax.stages.train_rl import train_rl
from tests.parallel.test_processes import free_port
from tests.rl.engines.ray_nodes import cluster_of_nodes, needs_ray
from tests.rl.engines.seeded_engine import TOKEN, Engine
from tests.stages.command_line import finish, start
from tests.stages.fleet_config import STEPS, get_config

ROOT = Path(__file__).parents[2]
SIZES = ("--slots=4", "--max_model_len=512", "--return_routed_experts")
SECONDS_TO_END = 20
"""Less than JAX needs to notice that a process is gone (100 s)."""


@contextlib.contextmanager
def engine(publish, port, token_file, *options):
    """An engine in a process of its own, which waits for the first version."""
    command = [sys.executable, "-m", "launch.serve", f"--checkpoint=patches:{publish}", f"--engine_port={port}"]
    command += [f"--token_file={token_file}", "--port=0", *SIZES, *options]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
    reader.start()
    try:
        yield process, said
    finally:
        process.kill()
        process.wait()
        reader.join()
        sys.stderr.write("".join(said))


@contextlib.contextmanager
def two_processes(publish, port, token_file, *options):
    """An engine of two processes, each with its own shards of the weights."""
    hosts = (f"--coordinator=127.0.0.1:{free_port()}", "--processes=2", *options)
    with (
        engine(publish, port, token_file, *hosts, "--process=0") as first,
        engine(publish, port, token_file, *hosts, "--process=1") as second,
    ):
        yield first, second


def run_of(folder, engines=(), token="", **changes):
    """Runs RL in a folder; with engines, these sample."""
    config = get_config(f"{folder}.weights")
    if engines:
        config.rl.engines = ",".join(f"127.0.0.1:{port}" for port in engines)
    config.rl.update(changes)
    with Run(config, folder) as run:
        run.services.engine_token = token
        train_rl(run)


def sampled(folder):
    """The rows of all groups, in order."""
    with RolloutLedger(folder, lambda: None) as ledger:
        groups = [ledger.load(number) for number in range(len(ledger.admitted))]
    return [row for group in groups for episode in group.episodes for row in episode.transcript.rows()]


def require_equal(folder, expected, *, learned_nats=1e-5):
    """The run in a folder has sampled and trained what another one has.

    learned_nats: by which log-probabilities differ at most that come from weights which the runs have learned.
    """
    rows = [sampled(path) for path in (folder, expected)]
    assert len(rows[0]) == len(rows[1]) > 0
    for one, two in zip(*rows, strict=True):
        for name in ("tokens", "trained", "versions", "routes"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name), name)
        nats = learned_nats if one.versions.max() else 1e-5
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=nats)
    steps = [[json.loads(line)["tasks"] for line in (path / "batches.jsonl").open()] for path in (folder, expected)]
    assert steps[0] == steps[1] and len(steps[0]) == STEPS


def require_versions(folder):
    assert {int(version) for row in sampled(folder) for version in row.versions[row.trained]} == {0, 1}


def url_of(said):
    """Waits until the engine that says this serves; returns its address."""
    while not (found := re.search(r"listens on (http://\S+)/", "".join(said))):
        time.sleep(0.05)
    return found[1]


def wait_for_work(said):
    """Waits until the engine that says this samples; returns its address."""
    url = url_of(said)
    while not httpx.get(f"{url}/stats", timeout=60).json()["running"]:
        time.sleep(0.01)
    return url


def control(url, command):
    """Calls the control plane of an engine whose key is "k"."""
    httpx.post(f"{url}/{command}", headers={"authorization": "Bearer k"}, timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The folder of a run that samples by itself."""
    folder = tmp_path_factory.mktemp("local") / "run"
    run_of(folder)
    return folder


@pytest.mark.slow
def test_two_engines_sample_what_a_run_samples_by_itself(tmp_path, local):
    token_file, ports = tmp_path / "token", [free_port(), free_port()]
    token, folder = make_token(token_file), tmp_path / "run"
    with (
        engine(f"{folder}.weights", ports[0], token_file) as (first, _),
        engine(f"{folder}.weights", ports[1], token_file) as (second, _),
    ):
        run_of(folder, ports, token)
        assert first.poll() is second.poll() is None
    require_equal(folder, local)
    require_versions(folder)
    metrics = read_metrics(folder / "metrics" / "rl.jsonl")
    assert all(row["weight_gap"] < 0.05 for row in metrics)
    assert metrics[-1]["engines_lost"] == metrics[-1]["messages_resampled"] == 0


@pytest.mark.slow
def test_an_engine_that_is_killed_while_it_samples_changes_no_token(tmp_path, local, monkeypatch):
    """The only engine: the run waits until another one has been started at its address.

    It is frozen first, so that what is asked and not answered half a second later cannot be answered any more.
    """
    fleets = []
    monkeypatch.setattr(rl_stage, "open_fleet", lambda *args: fleets.append(open_fleet(*args)) or fleets[0])
    token_file, port = tmp_path / "token", free_port()
    token, folder = make_token(token_file), tmp_path / "run"
    with contextlib.ExitStack() as stack:
        killed, said = stack.enter_context(engine(f"{folder}.weights", port, token_file))

        def kill():
            wait_for_work(said)
            killed.send_signal(signal.SIGSTOP)
            owed = lambda: fleets[0].router.links[0].connection._messages  # noqa: E731
            while not (before := owed()) or time.sleep(0.5) or owed() != before:
                time.sleep(0.01)
            killed.kill()
            killed.wait()
            stack.enter_context(engine(f"{folder}.weights", port, token_file))

        killer = threading.Thread(target=kill)
        killer.start()
        run_of(folder, [port], token)
        killer.join()
    require_equal(folder, local)
    metrics = read_metrics(folder / "metrics" / "rl.jsonl")
    assert metrics[-1]["engines_lost"] == 1 and 0 < metrics[-1]["messages_resampled"] <= 4


@pytest.mark.slow
def test_an_engine_dies_whole_when_its_second_process_is_killed_and_comes_back(tmp_path, local):
    """Its messages are sampled again elsewhere: on an engine that is then paused until the whole one is back."""
    token_file, ports, folder = tmp_path / "token", [free_port(), free_port()], tmp_path / "run"
    token, weights = make_token(token_file), f"{folder}.weights"
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        start_both = lambda: stack.enter_context(two_processes(weights, ports[0], token_file, "--tensor=2"))  # noqa: E731
        (first, said), (second, _) = start_both()

        def kill():
            """Returns the seconds to the end of the other process, and the address of the engine that is back."""
            wait_for_work(said)
            second.kill()
            before = time.monotonic()
            assert first.wait(60) == 1
            seconds = time.monotonic() - before
            _, said_elsewhere = stack.enter_context(engine(weights, ports[1], token_file, "--control_key=k"))
            elsewhere = wait_for_work(said_elsewhere)
            control(elsewhere, "pause?mode=keep")
            (_, said_again), _ = start_both()
            back = url_of(said_again)
            control(elsewhere, "resume")
            return seconds, back

        killer = pool.submit(kill)
        run_of(folder, ports, token)
        seconds, back = killer.result()
        sampled_tokens = httpx.get(f"{back}/stats", timeout=60).json()["sampled_tokens"]
    require_equal(folder, local)
    require_versions(folder)
    assert seconds < SECONDS_TO_END
    assert said[-1] == "launch.serve: process 1 ended: it was killed, or its machine is gone\n", said[-3:]
    assert "Traceback" not in "".join(said)
    assert sampled_tokens > STEPS, "it is used again, not only by the weight check of each step, which samples a token"
    metrics = read_metrics(folder / "metrics" / "rl.jsonl")[-1]
    assert metrics["engines_lost"] == 1 and 0 < metrics["messages_resampled"] <= 4
    assert metrics["engines_newest"] + metrics["engines_late"] == 2


@pytest.mark.slow
def test_a_learner_of_two_processes_has_one_fleet(tmp_path, local):
    """Process 0 has the engines; both play, learn and publish their shards."""
    token_file, port, coordinator = tmp_path / "token", free_port(), free_port()
    make_token(token_file)
    folder = tmp_path / "run"
    command = [f"--config=tests/stages/fleet_config.py:{folder}.weights", f"--config.rl.engines=127.0.0.1:{port}"]
    command += [f"--token_file={token_file}", f"--coordinator=127.0.0.1:{coordinator}", "--processes=2"]
    with engine(f"{folder}.weights", port, token_file):
        learners = [
            start(folder, *command, f"--process={i}", cache=tmp_path / "cache", entry="launch.rl") for i in range(2)
        ]
        ended = [finish(learner, timeout=400) for learner in learners]
    assert [one.returncode for one in ended] == [0, 0], "\n".join(one.stderr for one in ended)[-6000:]
    # Gradients of two processes are added in another order, and published weights are rounded to 8 bits.
    require_equal(folder, local, learned_nats=5e-3)
    receiver = WeightReceiver(f"{folder}.weights")
    assert receiver.receive() == STEPS


@pytest.fixture
def ray_nodes(monkeypatch):
    with cluster_of_nodes(monkeypatch) as nodes:
        yield nodes


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(("version", "engine"), [(0, 0), (0, -1), (1, 0)])
def test_engines_of_ray_beside_its_workers_sample_the_same_though_a_node_is_killed(
    tmp_path, local, ray_nodes, monkeypatch, version, engine
):
    """A node whose engine samples is killed with its worker; the other node plays and samples the rest.

    version: of the weights from which on that happens. engine: which one of those that sample.
    """
    cluster, nodes = ray_nodes
    folder, fleets, killed = tmp_path / "run", [], []
    monkeypatch.setattr(rl_stage, "open_fleet", lambda *args: fleets.append(open_fleet(*args)) or fleets[0])

    def kill():
        is_sampling = lambda link: link.connection is not None and link.connection._messages  # noqa: E731
        of_version = lambda: [fleet for fleet in fleets if fleet.version >= version]  # noqa: E731
        while not (links := [link for fleet in of_version() for link in fleet.router.links if is_sampling(link)]):
            time.sleep(0.01)
        killed.extend(node for node in nodes if node.node_id == links[engine].place._node.node_id)
        cluster.remove_node(killed[0], allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    config = get_config(f"{folder}.weights")
    config.rl.update({"engines": "ray", "fleet": {"cpu_nodes": 1, "patience_s": 1200.0}})
    config.sampler.slots = 4  # of one engine; the run that samples by itself has as many per copy of the weights
    with RayCluster(cluster.address) as connection, Run(config, folder) as run:
        pool = PoolOptions(connection.host, patience_s=1200.0)
        run.services.worker_options = RolloutWorkersOptions(pool, TOKEN, connection)
        train_rl(run)
    killer.join()
    assert killed
    require_equal(folder, local)
    require_versions(folder)
    metrics = read_metrics(folder / "metrics" / "rl.jsonl")
    assert metrics[-1]["engines_lost"] == 1 and metrics[-1]["messages_resampled"] <= 4, "it has four slots"


def test_engines_that_cannot_be_used_are_refused_before_weights_are_loaded(tmp_path, caplog):
    """Engines on the real wire, in a thread; what they serve is never asked for anything."""
    config = get_config(str(tmp_path / "weights"))
    with Run(config, tmp_path / "run") as run, EventLoop() as loop:
        required = required_engine(run)
        fits = EngineDescription("e", required.network, required.tokenizer, required.end_tokens, 512, 4, 4, True, "f")
        assert not required.find_refusal(fits)
        engine = Engine()

        async def look(description, token):
            engine.description = description
            async with engine.serving(), engine.listening(token=token):
                set_engines(run, f"127.0.0.1:{engine.port}")
                await asyncio.to_thread(check_engines, run, required)

        run.services.engine_token = TOKEN
        loop.run(look(fits, TOKEN))
        for change, says in (
            ({"network": "other"}, "it serves another model"),
            ({"tokenizer": "other"}, "it has another tokenizer"),
            ({"returns_routing": False}, "start it with --return_routed_experts, or use rl.router_replay=off"),
        ):
            with pytest.raises(UserError, match=says):
                loop.run(look(dataclasses.replace(fits, **change), TOKEN))
        with pytest.raises(UserError, match="the token is another"):
            loop.run(look(fits, "another token of the tests"))
        set_engines(run, f"127.0.0.1:{free_port()}")
        check_engines(run, required)
        assert "No engine answers at 127.0.0.1" in caplog.text
        run.services.engine_token = ""
        with pytest.raises(UserError, match="run launch.rl with --token_file"):
            check_engines(run, required)
        set_engines(run, "ray")
        with pytest.raises(UserError, match="run launch.rl with --cluster=auto"):
            check_engines(run, required)


def set_engines(run, address):
    run.config = dataclasses.replace(run.config, rl=dataclasses.replace(run.config.rl, engines=address))
