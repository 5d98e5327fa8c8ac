"""Servers that write traffic: in front of a small network, and of messages that a test writes."""

import contextlib
import json

import httpx2 as httpx
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.policy import Sample
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from composer_jax.serve.traffic.consent import TrafficHeaders
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.writer import TrafficLimits, TrafficWriter
from tests.serve.conftest import running
from tests.serve.scripted_engine import ScriptedEngine

QUICK = TrafficLimits(flush_seconds=0.01)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "traffic"


@pytest.fixture
def policy_file(tmp_path):
    """(**fields) -> path of a policy with these fields."""

    def write(**fields):
        path = tmp_path / "policy.json"
        path.write_text(json.dumps({"consent_text": "We store your conversations.", **fields}))
        return str(path)

    return write


@pytest.fixture
def new_writer(folder, policy_file, text):
    """(**options) -> a writer of the folder, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(limits=QUICK, file=None, folder=folder, **options):
            writer = TrafficWriter(folder, policy_file() if file is None else file, text, limits=limits, **options)
            stack.callback(writer.close)
            return writer

        yield start


@pytest.fixture
def served(text, new_writer):
    """(write, ...) -> context manager of (ask, writer) of a server; write: context -> sampled ids."""

    @contextlib.contextmanager
    def start(write, *, writer=None, engine=None, api_keys=(), delay=0.0, **options):
        writer = writer or new_writer(**options)
        engine = engine or ScriptedEngine(write, text.end_tokens, delay=delay)
        service = Service(engine, text.named("m"), ServerLimits(), None, writer)
        with running(new_app(service, api_keys)) as url:
            yield Asker(url, service), writer

    return start


class Asker:
    """Asks a server as a client that consents to training."""

    def __init__(self, url, service):
        self.url, self.service = url, service
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path, body, session="s", consent="training", key="", **headers):
        named = {"X-Session-ID": session, "X-Consent": consent, **headers}
        named = {name: str(value).encode() for name, value in named.items() if value}
        if key:
            named["authorization"] = f"Bearer {key}"
        return self.client.post(path, json=body, headers=named)

    def ask(self, prompt, session="s", consent="training", key="", n=None, headers=(), **fields):
        """Completes a prompt of token ids; returns the body of the answer."""
        body = {"prompt": prompt, "max_tokens": 8, "return_token_ids": True, "n": n} | fields
        answer = self.post("/v1/completions", body, session, consent, key, **dict(headers))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, *events, session="s", key=""):
        rows = [{"session": session, **event} for event in events]
        return self.post("/events", {"events": rows}, "", "", key)


def open_request(writer, session, *, key="k", user="", consent="training"):
    """Begins a request of a session."""
    return writer.open_request(key, session, TrafficHeaders(consent, user=user), "cmpl-" + "0" * 24, ())


def offer(writer, session, prompt=(1, 2), user="", request=None, key="k"):
    """Gives a writer a turn, or the end of a request."""
    request = request or open_request(writer, session, key=key, user=user)
    sample = Sample([9, 8], [-1.0, -1.0], [0, 0], "stop", [-1.0, -1.0])
    writer.offer(request, 0, [*prompt], sample, SamplingParams(4), 0)


def stored(folder):
    """Everything that can be read of a folder: session -> SessionTraffic."""
    reader = TrafficFolder(folder)
    return {record.session: reader.read(record.session) for record in reader.sessions()}


def all_bytes(folder):
    """Name -> content of every file of a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
