"""Servers on free ports: one with a small network, and one whose messages a test writes."""

import contextlib
import dataclasses
import threading
import time

import jax
import pytest
import uvicorn

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from tests.serve.scripted_engine import ScriptedEngine
from tests.stages.base_model import NETWORK, weights, write_base

CAPACITY = 512
CONTROL_KEY = "the trainer's"


@contextlib.contextmanager
def running(app):
    """Runs an application in a thread; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server ended"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The text side of a small published model whose format has thinking, tools and calls."""
    return open_checkpoint(f"hf:{write_base(tmp_path_factory.mktemp('served') / 'small')}").text


@pytest.fixture(scope="session")
def sampler(text):
    mesh = make_mesh(jax.devices()[:1])
    config = SamplerConfig(slots=4, max_model_len=CAPACITY, decode_steps=4, prefill_shapes=((2, 32),), page_size=16)
    definition = ModelDef(dataclasses.replace(NETWORK, cache_routing=True))
    sampler = Sampler(definition, mesh, config, end_tokens=text.end_tokens, decode=text.tokenizer.decode)
    sampler.update(*weights(), version=7)
    sampler.warm_up(processed=True)
    return sampler


@pytest.fixture(scope="session")
def network_service(text, sampler):
    async def install(checkpoint, version, **options):
        await sampler.update_serving(*weights(), version, copy=False, **options)

    return Service(sampler, text.named("small"), ServerLimits(body_bytes=1 << 20), install)


@pytest.fixture(scope="session")
def network_url(network_service):
    with running(new_app(network_service, (), CONTROL_KEY)) as url:
        yield url


@pytest.fixture
def scripted(text):
    """(write, limits, keys) -> context manager of (url, engine); write: context -> sampled ids."""
    named = text.named("scripted")

    @contextlib.contextmanager
    def start(write, limits=None, api_keys=(), control_key="", delay=0.0):
        engine = ScriptedEngine(write, text.end_tokens, delay=delay)
        service = Service(engine, named, limits or ServerLimits())
        with running(new_app(service, api_keys, control_key)) as url:
            yield url, engine

    return start
