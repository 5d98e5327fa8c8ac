"""A server of two processes follows a folder of versions: each reads its own parts, and all have a version or none."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2 as httpx
import jax
import jax.numpy as jnp
import pytest

from composer_jax.checkpoint.checkpoint import describe_versions
from composer_jax.checkpoint.weight_chain import WeightPublisher
from composer_jax.checkpoint.weight_shards import local_shards
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from tests.parallel.test_processes import free_port
from tests.stages.base_model import NETWORK, write_base

ROOT = Path(__file__).parents[2]
SIZES = ("--port=0", "--slots=2", "--max_model_len=256", "--dtype=float32")
ASK = {"prompt": [3, 9, 14, 27], "max_tokens": 24, "seed": 3, "temperature": 1.0, "return_token_ids": True}
SECONDS_TO_END = 20
"""Less than JAX needs to notice that a process is gone (100 s)."""


class Trainer:
    """Publishes versions, cut as a learner over two tensor-parallel devices cuts them."""

    def __init__(self, folder: Path) -> None:
        run = folder / "run"
        run.mkdir()
        (run / "base").symlink_to(write_base(folder / "small"))
        self.chain = folder / "weights"
        describe_versions(str(self.chain), ModelDef(NETWORK), str(run))
        self._publisher = WeightPublisher(str(self.chain), anchor_every=4)
        params, bias = ModelDef(NETWORK).init(1, make_mesh(jax.devices()[:2], tensor=2))
        self._weights = {"params": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), "router_bias": bias}

    def publish(self, version: int) -> None:
        """A version in which some tensors have changed."""
        params = self._weights["params"]
        for name in ("head", "embedding"):
            params[name] = jax.tree.map(lambda leaf: jnp.roll(leaf, version, axis=0) * 1.5, params[name])
        self._weights = jax.tree.map(jnp.copy, self._weights)
        self._publisher.publish(local_shards(self._weights), version)

    def damage(self, version: int) -> None:
        """Changes what only the second process of a server reads of a version."""
        folder, at = self.chain / f"version-{version:08d}", 0
        for entry in json.loads((folder / "shards-00000.json").read_bytes()):
            if any(entry["start"]) and entry["patch_bytes"] and entry["changed"]:
                break
            at += entry["patch_bytes"]
        else:
            pytest.fail("no shard is the second process' alone")
        content = bytearray((folder / "shards-00000.patch").read_bytes())
        content[at] ^= 255
        (folder / "shards-00000.patch").write_bytes(content)


@contextlib.contextmanager
def started(chain: Path, *options: str):
    """A process of a server and what it says."""
    command = [sys.executable, "-m", "launch.serve", f"--checkpoint=patches:{chain}", *SIZES, *options]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        yield process, said
    finally:
        process.kill()
        process.wait()
        reader.join()
        sys.stderr.write("".join(said))


@contextlib.contextmanager
def two_processes(chain: Path):
    hosts = [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2", "--tensor=2"]
    with started(chain, *hosts, "--process=0") as first, started(chain, *hosts, "--process=1") as second:
        yield first, second


def url_of(server) -> str:
    process, said = server
    while not (match := re.search(r"listens on (http://\S+?)/ ", "".join(said))):
        assert process.poll() is None, "".join(said)
        time.sleep(0.05)
    return match[1]


def ask(url: str, **changes) -> dict:
    answer = httpx.post(f"{url}/v1/completions", json=ASK | changes, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def wait_for(url: str, version: int) -> None:
    deadline = time.monotonic() + 60
    while (health := httpx.get(f"{url}/health", timeout=30).json())["weight_version"] != version:
        assert time.monotonic() < deadline, health
        time.sleep(0.05)


class Asking(threading.Thread):
    """Asks again and again until `end`; the versions that computed the answers' tokens."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._ending = url, threading.Event()
        self.versions: set[int] = set()
        self.errors: list[BaseException] = []
        self.start()

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                self.versions.update(ask(self._url, max_tokens=100)["weight_versions"])
        except BaseException as error:
            self.errors.append(error)

    def end(self) -> None:
        self._ending.set()
        self.join()
        assert not self.errors, self.errors


@pytest.mark.slow
def test_two_processes_follow_versions_refuse_what_one_cannot_read_and_end_together(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.publish(1)
    with started(trainer.chain) as alone:
        with two_processes(trainer.chain) as (first, second):
            one, two, tokens = url_of(alone), url_of(first), []

            def compare(version: int) -> None:
                """Both have the version, and sample the same tokens with it."""
                for url in (one, two):
                    wait_for(url, version)
                answers = [ask(url) for url in (one, two)]
                assert [set(answer["weight_versions"]) for answer in answers] == [{version}] * 2
                assert answers[0]["token_ids"] == answers[1]["token_ids"] not in tokens
                sums = [httpx.get(f"{url}/health").json()["weight_checksums"] for url in (one, two)]
                assert sums[0] == sums[1]
                tokens.append(answers[0]["token_ids"])

            compare(1)
            asking = Asking(two)
            for version in (2, 3):
                trainer.publish(version)
                compare(version)
            asking.end()
            assert asking.versions == {1, 2, 3}

            trainer.publish(4)
            trainer.damage(4)
            while not (refused := httpx.get(f"{two}/health").json()["refused"]):
                time.sleep(0.05)
            assert "process 1: version 4 of the weights" in refused and "cannot be built" in refused
            assert ask(two)["token_ids"] == tokens[-1], "process 0 has read version 4 and does not serve it"
            trainer.publish(5)  # in full
            compare(5)

            second[0].send_signal(signal.SIGKILL)
            before = time.monotonic()
            assert first[0].wait(SECONDS_TO_END) == 1 and time.monotonic() - before < SECONDS_TO_END
        assert "process 1 ended: it was killed, or its machine is gone" in "".join(first[1])
        trainer.publish(6)
        with two_processes(trainer.chain) as (first, _):
            two = url_of(first)
            compare(6)
            trainer.publish(7)
            compare(7)
