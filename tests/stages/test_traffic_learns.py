"""Sessions that a server has written become a version of the weights: the first half of a cycle, with all its parts."""

import asyncio
import functools

import pytest

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.observe.metrics import read_metrics
from composer_jax.realtime.batches.store import read_batch
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.stages.run import Run
from composer_jax.stages.traffic_cycle import Deployment, advance, open_releases
from tests.realtime.batches.conftest import BEGAN, Traffic
from tests.stages.traffic_run import get_config

USERS = 8
CAPS = {"cap_user": 1.0, "cap_repository": 1.0, "cap_organisation": 1.0}


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that has begun, and FOLDER/weights."""
    config = get_config(str(tmp_path))
    config.traffic.batch.update({"min_sessions": USERS, **CAPS})
    with Run(config, tmp_path / "run"):
        return tmp_path


async def sample_answers(sampler, text, users):
    """Returns user -> (prompt, answer with the routes of its tokens)."""
    answers = {}
    async with sampler.serving():
        for number, user in enumerate(users):
            chat = text.chat_format
            prompt = [*chat.render([Message("user", f"Repair function {number}.")]), *chat.generation_prompt]
            session = await sampler.open(number)
            answers[user] = prompt, await session.sample(prompt, SamplingParams(8, return_routing=True))
            session.close()
    return answers


@pytest.mark.slow
def test_a_release_learns_from_what_users_did(folder):
    now, users = [BEGAN], [f"user{i}" for i in range(USERS)]
    clock = lambda: now[0]  # noqa: E731
    with open_releases(folder / "run", by="test", clock=clock) as (run, releases):

        def take_step(*folders):
            return advance(run, releases, Deployment(folders, skip_aa=True, clock=clock))

        assert take_step().state == "collecting"
        text = open_checkpoint(f"patches:{folder / 'weights'}").text
        run.services.prepare_updates()
        sampler = run.services.sampler_with(*run.model.weights_before("rl"), version=0)
        answers = asyncio.run(sample_answers(sampler, text, users))
        sampler.release()

        def write_sessions(some):
            traffic = Traffic(folder / "traffic", text, routing=True)
            traffic.now, traffic.number = now[0], 100 * users.index(some[0])
            for user in some:
                write_session(traffic, user, *answers[user], kept=users.index(user))
            traffic.close()
            now[0] = traffic.now
            return TrafficFolder(traffic.path)

        take_step = functools.partial(take_step, write_sessions(users[:5]))
        assert take_step().waits_for == "4 of 8 sessions are labelled and can be trained; 4 more are needed."
        now[0] += 4 * 3600
        assert take_step().waits_for == "5 of 8 sessions are labelled and can be trained; 3 more are needed."
        write_sessions(users[5:])
        now[0] += 4 * 3600
        assert [take_step().state for _ in range(3)] == ["labelled", "trained", "gated"]
        assert set(releases.last.gate["suites"]) == {"bugs"}
        assert take_step().state == "canary"
    batch = read_batch(folder / "run", 1)
    assert len(batch.groups) == USERS
    written = read_metrics(folder / "run" / "metrics" / "rl.jsonl")
    assert sum(row["sessions"] for row in written) == USERS
    # The recorded log-probabilities are those of the learner's weights.
    assert abs(written[0]["sampler_kl"]) < 1e-4 and all(row["trained_tokens"] > 0 for row in written)


def write_session(traffic, user, prompt, sample, kept):
    """Writes a session of one answer, and how many of its ten lines the user kept after an hour."""
    session = f"session of {user}"
    answer, _ = traffic.answer(
        *(session, prompt, sample.tokens),
        user=user,
        version=0,
        logprobs=sample.logprobs,
        routing=sample.routing,
        finish=sample.finish_reason,
    )
    traffic.event(session, "shown", answer, hunks=["a" * 16])
    traffic.now += 3600
    traffic.measured(session, kept)
