"""Turns of an episode: those of its task, and no more than the limit of all episodes."""

import asyncio
import dataclasses

import pytest

from composer_jax.agent.episode import run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.messages import ToolCall
from tests.agent.conftest import task_of

READ, FINISH = ToolCall("read", {"path": "a.py"}), ToolCall("finish", {})


@pytest.mark.parametrize(("of_task", "of_all", "turns"), [(2, 5, 2), (5, 2, 2), (None, 3, 3), (2, 2, 2)])
@pytest.mark.parametrize(("last", "outcome"), [(READ, "out_of_turns"), (FINISH, "finished")])
def test_the_smaller_limit_ends_an_episode(chat_format, pool, scripted_session, of_task, of_all, turns, last, outcome):
    calls = [READ] * (turns - 1) + [last]
    session = scripted_session([chat_format.render_assistant("", [call]) for call in calls])
    task = dataclasses.replace(task_of({"a.py": "x"}, max_turns=of_task), tools=("read", "finish"))
    context = EpisodeContext(chat_format, pool, EpisodeSettings(EpisodeLimits(max_turns=of_all)))
    episode = asyncio.run(run_episode(EpisodeSpec(task, 0, Compaction(None)), session, context))
    assert (episode.outcome, episode.turns) == (outcome, turns) and not session.messages
