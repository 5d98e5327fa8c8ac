"""A server's traffic without a server: its own writer and event log, on a clock that a test sets."""

import asyncio
import contextlib
import json

import numpy as np
import pytest

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.weight_chain import Shard, WeightPublisher
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.release.releases import ReleaseFolder
from composer_jax.sampler.policy import Sample
from composer_jax.serve.traffic.consent import TrafficHeaders
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.events import EventBody, EventLog
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.writer import TrafficLimits, TrafficWriter
from tests.stages.base_model import write_base

BEGAN = 1_000_000_000.0
H = 3600.0


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return open_checkpoint(f"hf:{write_base(tmp_path_factory.mktemp('batches') / 'small')}").text


def answer_id(number):
    return f"chatcmpl-{number:024x}"


class Traffic:
    """Sessions of a folder. Every answer takes a minute; its number is the last digits of its id."""

    def __init__(self, folder, text, *, keys=None, consents=None, salt="of these tests", arm="", routing=False):
        self.path, self.keys, self.now, self.number = folder, keys or {}, BEGAN, 0
        organisations = {
            name: {"consent": (consents or {}).get(name, "training"), "keys": [digest]}
            for name, digest in self.keys.items()
        }
        policy = folder.parent / f"{folder.name}.json"
        policy.write_text(json.dumps({"consent_text": "We store it.", "salt": salt, "organisations": organisations}))
        limits = TrafficLimits(flush_seconds=0.01)
        clock = lambda: self.now  # noqa: E731
        self.writer = TrafficWriter(folder, str(policy), text, limits=limits, clock=clock, arm=arm,
                                    keeps_routing=routing)  # fmt: skip
        self.log = EventLog(self.writer, clock)

    def answer(self, session, prompt, tokens, *, user="u", key="key", consent="training", kind="main", version=3,
               repository="", choices=1, routing=None, finish="stop", logprobs=None, **params):  # fmt: skip
        """Writes an answer; returns (its id, the prompt that goes on from it). version: one, or one of each token."""
        self.now += 60
        self.number += 1
        headers = TrafficHeaders(consent, kind, user, repository)
        request = self.writer.open_request(key, session, headers, answer_id(self.number), [])
        versions = [version] * len(tokens) if isinstance(version, int) else list(version)
        logprobs = logprobs or [-0.1 * (1 + i % 7) for i in range(len(tokens))]
        for choice in range(choices):
            ids = [*tokens[: len(tokens) - bool(choice)], *([400 + choice] if choice else [])]
            sample = Sample(ids, logprobs, versions, finish, logprobs, routing=routing)
            self.writer.offer(request, choice, prompt, sample, SamplingParams(64, **params), 0)
        return answer_id(self.number), [*prompt, *tokens]

    def event(self, session, kind, about="", *, key="key", age=0.0, **payload):
        self.now += 1
        self.number += 1
        body = EventBody(id=f"e{self.number}", session=session, kind=kind, turn=about, age=age, payload=payload)
        assert asyncio.run(self.log.add(key, [body])) == 1

    def measured(self, session, kept, *, key="key", added=10):
        """The client's measurement of kept lines, an hour after the last answer."""
        counts = {"added": added, "added_kept": kept, "deleted": 0, "deleted_kept": 0, "censored": 0}
        self.event(session, "edited_after", key=key, horizon=H, **counts, others=0, others_kept=0)

    def close(self):
        self.log.close()
        self.writer.close()

    def label(self, context=None):
        """Labels all sessions, hours later; returns the folder."""
        self.close()
        folder = TrafficFolder(self.path)
        with contextlib.closing(open_database(self.path)) as database:
            label_sessions(folder, database, H, context=context, clock=lambda: self.now + 10 * H)
        return folder


@pytest.fixture
def new_traffic(tmp_path, text):
    """(name, **options) -> Traffic in a folder of this name, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(name="traffic", **options):
            traffic = Traffic(tmp_path / name, text, **options)
            stack.callback(traffic.close)
            return traffic

        yield start


@pytest.fixture
def chain(tmp_path):
    """A folder with the versions 1 to 5."""
    publisher = WeightPublisher(str(tmp_path / "weights"))
    for version in range(1, 6):
        publisher.publish({Shard("w", (0,), (3,)): np.full(3, version, np.float32)}, version)
    return str(tmp_path / "weights")


@pytest.fixture
def collecting(tmp_path, chain):
    """The releases of a workdir in which version 3 serves and release 1 collects."""
    with ReleaseFolder(tmp_path, by="test", clock=lambda: BEGAN + 100 * H) as folder:
        folder.begin(chain, 3)
        yield folder
