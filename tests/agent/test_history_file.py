"""Episodes whose replaced messages stay in a file, and episodes with failed summaries."""

import asyncio

import pytest

from composer_jax.agent.episode import EpisodeLimits, run_episode
from composer_jax.agent.history_file import HistoryFile
from composer_jax.agent.summary import FACTS, Compaction
from composer_jax.agent.workspace import Workspace
from composer_jax.data import chat
from composer_jax.data.chat import ToolCall
from composer_jax.tasks import ScriptGrader, Task
from tests.agent.conftest import task_of

FINISH = ToolCall("finish", {})
READ = ToolCall("read_file", {"path": "a.txt"})
HISTORY = ".conversation/history.txt"
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
        limits = EpisodeLimits(max_turn_tokens=400)
        session = scripted_session(ids, 20_000)
        episode = asyncio.run(run_episode(task, session, pool, chat_format, compaction=compaction, limits=limits))
        assert episode.outcome == "finished" and not session.messages, episode.detail
        return episode, [chat.to_text(tok, node.tokens.tolist()) for node in episode.transcript.nodes]

    def render(call):
        return chat.render_assistant(tok, "", [call])

    return run


WRITE = ToolCall("shell", {"command": f"cat {HISTORY} > /dev/null; echo b > b.txt; find . -type f | sort"})
SEARCH = ToolCall("grep", {"pattern": "47", "path": HISTORY})
SHOW = ToolCall("read_file", {"path": HISTORY})


def test_the_agent_reads_and_searches_what_it_forgot_and_the_grade_does_not_see_it(play):
    """Tools and commands see the file; the grading workspace has the agent's files only."""
    episode, shown = play(READ, "all read", SEARCH, "number = 47", SHOW, "go on", WRITE, FINISH, history_file=True)
    assert (episode.summaries, episode.failed_summaries) == (3, 0)
    carries = [text for text in shown if text.startswith("<|user|>Summary")]
    assert f"Summary 1:\nall read\nHistory: {HISTORY} has all earlier messages" in carries[0]
    answers = [text for text in shown if text.startswith("<|tool|>")]
    assert "the number is 47" in answers[1] and HISTORY in answers[1]
    for text in ('read_file {"path":"a.txt"}', "[tool]", "[carry]", "Summary 1:", 'grep {"pattern":"47"'):
        assert text in answers[2]
    assert "Do it." not in answers[2], "the prompt is in every branch"
    assert HISTORY in answers[3] and "./b.txt" in answers[3]
    assert episode.reward == 1.0 and episode.flags == []
    assert episode.usage.changed_files == 1


def test_without_the_option_there_is_no_file(play):
    episode, shown = play(READ, "all read", WRITE, FINISH)
    assert not any("History" in text for text in shown) and episode.reward == 1.0


def test_the_folder_is_one_that_the_workspace_does_not_have(pool, chat_format):
    async def add(files):
        workspace, history = Workspace(task_of(files), pool), HistoryFile()
        paths = [await history.add(workspace, [], chat_format) for _ in range(2)]
        return workspace, history, paths

    workspace, history, paths = asyncio.run(add({".conversation/a.py": "x", ".conversation1": "y", "b": "z"}))
    assert paths == [".conversation2/history.txt"] * 2
    assert set(history.without(workspace.changes)) == {".conversation/a.py", ".conversation1", "b"}
    assert HistoryFile().without(workspace.changes) == workspace.changes


def test_a_link_in_its_place_leaves_the_agent_without_the_file(pool, chat_format):
    async def add():
        workspace, history = Workspace(task_of({}), pool), HistoryFile()
        first = await history.add(workspace, [], chat_format)
        await workspace.shell("rm -r .conversation; ln -s /tmp .conversation", 5)
        second = await history.add(workspace, [], chat_format)
        await workspace.close()
        return first, second, history.without(workspace.changes)

    assert asyncio.run(add()) == (HISTORY, "", {})


@pytest.mark.parametrize("train", [True, False])
def test_failed_summaries_are_counted_and_need_not_be_trained(play, tok, train):
    cut = tok.encode("number = 47 and much more than fits")
    empty = [tok.end]
    episode, _ = play(
        READ, cut, READ, empty, READ, "all read", WRITE, FINISH, max_summary_tokens=12, train_failed_summaries=train
    )
    assert (episode.summaries, episode.failed_summaries) == (3, 2)
    nodes = episode.transcript.nodes_of_kind("summary")
    assert [node.trained for node in nodes] == [train, train, True]
    trained = sum(int(row.trained.sum()) for row in episode.transcript.rows())
    left_out = 0 if train else sum(len(node.sampled_tokens) for node in nodes[:2])
    assert trained == episode.transcript.total_sampled - left_out
    assert all(node.trained for node in episode.transcript.nodes_of_kind("assistant"))


@pytest.mark.parametrize("train_failed", [True, False])
def test_summaries_may_be_left_out_of_the_loss_and_nothing_else_is(play, tok, train_failed):
    episode, _ = play(
        READ, "number = 47", READ, [tok.end], WRITE, FINISH, train_summaries=False, train_failed_summaries=train_failed
    )
    summaries = episode.transcript.nodes_of_kind("summary")
    assert [node.trained for node in summaries] == [False, False]
    trained = sum(int(row.trained.sum()) for row in episode.transcript.rows())
    assert trained == episode.transcript.total_sampled - episode.summary_tokens


@pytest.mark.parametrize(
    ("first", "second", "kept"), [("number = 47", "all read", (1.0, 0.0)), ("all read", "number = 47", (0.0, 1.0))]
)
def test_the_facts_of_the_first_and_the_last_summary_count(play, first, second, kept):
    episode, _ = play(READ, first, READ, second, WRITE, FINISH)
    assert (episode.facts_kept, episode.facts_kept_last) == kept
    episode, _ = play(WRITE, FINISH)
    assert (episode.facts_kept, episode.facts_kept_last) == (None, None)
