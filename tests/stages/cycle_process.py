"""Two releases that learn from sessions, in a process that a test kills: python -m tests.stages.cycle_process FOLDER.

The sessions of a release are sampled by its anchor. Time follows from what is on disk, four hours for a transition. The
labels of canaries say nothing, so that each release is released.
"""

import asyncio
import shutil
import sys
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.realtime.release.canary import LabelRow
from composer_jax.realtime.release.releases import read_releases
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.stages import traffic_cycle
from composer_jax.stages.evaluate_version import load_version
from composer_jax.stages.run import Run
from composer_jax.stages.traffic_cycle import Deployment, advance, open_releases
from tests.realtime.batches.conftest import BEGAN, Traffic
from tests.stages import traffic_run

RELEASES, USERS = 2, 8
STEP_S = 4 * 3600.0


def get_config(folder: Path) -> ConfigDict:
    config = traffic_run.get_config(str(folder))
    config.traffic.batch.update({"min_sessions": USERS, "cap_user": 1.0, "cap_repository": 1.0})
    config.traffic.canary.update({"min_users": 1})
    return config


def run_cycles(folder: Path) -> None:
    """Goes on with the cycle of a folder until both releases are released."""
    traffic_cycle.rows_of_canary = even_rows
    with Run(get_config(folder), folder / "run"):
        pass
    clock = lambda: BEGAN + STEP_S * (1 + transitions(folder))  # noqa: E731
    with open_releases(folder / "run", by="test", clock=clock) as (run, releases):
        while [one.state for one in releases.releases] != ["released"] * RELEASES:
            if releases.releases and releases.last.state == "collecting":
                write_sessions(run, folder, releases.last.number, releases.last.anchor)
            folders = [TrafficFolder(path) for path in sorted(folder.glob("traffic/[0-9]"))]
            step = advance(run, releases, Deployment(folders, skip_aa=True, clock=clock))
            assert step.moved, step


def transitions(folder: Path) -> int:
    return sum(len(one.transitions) for one in read_releases(folder / "run"))


def even_rows(folders, horizon, release) -> list[LabelRow]:
    """Returns a label for each of many users, in arms of their due sizes."""
    rng, every = np.random.default_rng(0), round(1 / release.fraction)
    arms = ["anchor" if i % every else "candidate" for i in range(1000)]
    return [LabelRow(str(i), arm, release.fraction, float(rng.normal())) for i, arm in enumerate(arms)]


def write_sessions(run: Run, folder: Path, number: int, version: int) -> None:
    """Writes the sessions of a release to FOLDER/traffic/NUMBER, all of them or none."""
    path, left = folder / "traffic" / str(number), folder / "traffic" / f"left{number}"
    if path.exists():
        return
    shutil.rmtree(left, ignore_errors=True)
    path.parent.mkdir(exist_ok=True)
    text = open_checkpoint(f"patches:{folder / 'weights'}").text
    answers = sample_answers(run, text, number, version)
    traffic = Traffic(left, text, routing=True)
    traffic.now, ids = BEGAN + STEP_S * transitions(folder), {}
    for user, (prompt, sample) in answers.items():
        ids[user], _ = traffic.answer(
            *(f"session {number} of {user}", prompt, sample.tokens),
            user=user,
            version=version,
            logprobs=sample.logprobs,
            routing=sample.routing,
            finish=sample.finish_reason,
        )
        traffic.event(f"session {number} of {user}", "shown", ids[user], hunks=["a" * 16])
    traffic.now += 3600
    for kept, user in enumerate(answers):
        traffic.measured(f"session {number} of {user}", kept)
    traffic.close()
    left.rename(path)


def sample_answers(run: Run, text, number: int, version: int) -> dict:
    """Returns user -> (prompt, answer with the routes of its tokens) of a version."""
    run.services.prepare_updates()
    sampler = run.services.sampler_with(*load_version(run, version), version=version)

    async def sample() -> dict:
        answers, chat = {}, text.chat_format
        async with sampler.serving():
            for i in range(USERS):
                message = Message("user", f"Repair function {i} of {number}.")
                prompt = [*chat.render([message]), *chat.generation_prompt]
                session = await sampler.open(100 * number + i)
                answers[f"user{i}"] = prompt, await session.sample(prompt, SamplingParams(8, return_routing=True))
                session.close()
        return answers

    answers = asyncio.run(sample())
    sampler.release()
    return answers


if __name__ == "__main__":
    run_cycles(Path(sys.argv[1]))
