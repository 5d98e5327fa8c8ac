"""Episodes with failed summaries, and with summaries that are not trained."""

import asyncio

import pytest

from composer_jax.agent.episode import run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import FACTS, Compaction
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.tasks import ScriptGrader, Task
from tests.to_text import to_text

FINISH = ToolCall("finish", {})
READ = ToolCall("read_file", {"path": "a.txt"})
# Full marks for a workspace with exactly the files a.txt and b.txt.
COUNTS = '[ "$(find . -type f | sort | tr "\\n" " ")" = "./a.txt ./b.txt " ] && echo 1 > /logs/verifier/reward.txt'


@pytest.fixture
def play(tok, chat_format, pool, scripted_session, tmp_path):
    """Plays an episode: messages are calls, or texts of summaries."""
    (tmp_path / "test.sh").write_text(COUNTS)
    files, facts = {"a.txt": "the number is 47\n" * 60}, {FACTS: ["number = 47"]}
    task = Task("t", "family", "train", "Do it.", files, ("repository/*",), ScriptGrader(tmp_path), metadata=facts)

    def run(*messages, **options):
        ids = [
            [*tok.encode(m), tok.end] if isinstance(m, str) else m if isinstance(m, list) else render(m)
            for m in messages
        ]
        compaction = Compaction(trigger=450, **options)
        context = EpisodeContext(chat_format, pool, EpisodeSettings(EpisodeLimits(max_turn_tokens=400)))
        session = scripted_session(ids, 20_000)
        episode = asyncio.run(run_episode(EpisodeSpec(task, 0, compaction), session, context))
        assert episode.outcome == "finished" and not session.messages, episode.detail
        return episode, [to_text(tok, node.tokens.tolist()) for node in episode.transcript.nodes]

    def render(call):
        return CompactFormat(tok).render_assistant("", [call])

    return run


WRITE = ToolCall("shell", {"command": "echo b > b.txt; find . -type f | sort"})


@pytest.mark.parametrize(("train", "train_failed"), [(True, True), (True, False), (False, True)])
def test_failed_summaries_are_counted_and_summaries_need_not_be_trained(play, tok, train, train_failed):
    cut, empty = tok.encode("number = 47 and much more than fits"), [tok.end]
    options = dict(max_summary_tokens=12, train_summaries=train, train_failed_summaries=train_failed)
    episode, _ = play(READ, cut, READ, empty, READ, "all read", WRITE, FINISH, **options)
    assert (episode.summaries, episode.failed_summaries) == (3, 2)
    nodes = episode.transcript.nodes_of_kind("summary")
    assert [node.trained for node in nodes] == [train and train_failed, train and train_failed, train]
    trained = sum(int(row.trained.sum()) for row in episode.transcript.rows())
    left_out = sum(len(node.sampled_tokens) for node in nodes if not node.trained)
    assert trained == episode.transcript.total_sampled - left_out
    assert all(node.trained for node in episode.transcript.nodes_of_kind("assistant"))


@pytest.mark.parametrize(
    ("first", "second", "kept"), [("number = 47", "all read", (1.0, 0.0)), ("all read", "number = 47", (0.0, 1.0))]
)
def test_the_facts_of_the_first_and_the_last_summary_count(play, first, second, kept):
    episode, _ = play(READ, first, READ, second, WRITE, FINISH)
    assert (episode.facts_kept, episode.facts_kept_last) == kept
    episode, _ = play(WRITE, FINISH)
    assert (episode.facts_kept, episode.facts_kept_last) == (None, None)
