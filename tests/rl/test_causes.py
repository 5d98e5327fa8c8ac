"""What ends an episode, and who pays for it: the table of causes in docs/rewards.md, row by row."""

import asyncio
from types import SimpleNamespace

import pytest

from composer_jax.agent import episode as harness
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.agent.tools import Tool, object_schema
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.rl.rollout import play_episode
from composer_jax.sandbox import LocalSandboxPool, RunResult, SandboxLimits
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.task import Task
from tests.agent.conftest import DyingPool
from tests.rl.scripted_policy import ScriptedPolicy, ScriptedSession
from tests.virtual_clock import run_virtually

CHAT = CompactFormat(Tokenizer.train(["kill -9 $PPID sleep 600 seconds command path text"] * 50, 400))
FINISH = ToolCall("finish", {})
SHELL = ToolCall("shell", {"command": "make"})
KILL = ToolCall("shell", {"command": "kill -9 $PPID"})
RIGHT = {"tools.py": "def double(x):\n    return 2 * x\n"}
KILLS_GRADER = {"tools.py": "import os\n\n\ndef double(x):\n    os.kill(os.getppid(), 9)\n"}


async def _wait(workspace, seconds):
    await asyncio.sleep(seconds)
    return "done"


WAIT = Tool("wait", "Waits.", object_schema(("seconds",), seconds={"type": "integer"}), _wait)


def task(files, *tools):
    cases = CaseGrader((Case("tools", "double", (2,), 4),))
    return Task("t", "family", "train", "Do it.", files, ("repository/*", *tools), cases)


class CountingPolicy(ScriptedPolicy):
    """Says the same calls in every session, and counts the sessions. open_s, sample_s: seconds of waiting for it."""

    def __init__(self, calls, open_s=0.0, sample_s=0.0):
        super().__init__(lambda seed: [CHAT.render_assistant("", [call]) for call in calls], max_model_len=100_000)
        self.seeds, self.open_s, self.sample_s = [], open_s, sample_s

    async def open(self, seed):
        self.seeds.append(seed)
        await asyncio.sleep(self.open_s)
        session = await super().open(seed)
        return SlowSession(self, session.messages, session.max_model_len)


class SlowSession(ScriptedSession):
    async def sample(self, context, params, branch=0):
        await asyncio.sleep(self.policy.sample_s)
        return await super().sample(context, params, branch)


async def play(policy, pool, files=RIGHT, seconds=None, tools=()):
    limits = EpisodeLimits(max_turns=20, max_turn_tokens=2000, max_episode_tokens=90_000)
    context = EpisodeContext(CHAT, pool, EpisodeSettings(limits, episode_seconds=seconds), ResultCache())
    async with policy.serving():
        return await play_episode(EpisodeSpec(task(files, *tools), 7, Compaction()), policy, context)


@pytest.fixture(scope="module")
def bare_pool():
    """Sandboxes of the backend that isolates nothing, in which a command can kill the worker."""
    with pytest.warns(RuntimeWarning, match="ISOLATES NOTHING"):
        pool = LocalSandboxPool(SandboxLimits(timeout_s=20), size=4, backend="subprocess")
    yield pool
    pool.kill()


def sampled_calls(episode):
    """The calls in the transcript, which is trained with the advantage of grade 0."""
    nodes = episode.transcript.nodes_of_kind("assistant")
    return [call for node in nodes for call in CHAT.parse(node.sampled_tokens.tolist()).calls]


# -- what the policy breaks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["sleep 600", "while :; do :; done"])
def test_a_command_beyond_the_limit_is_cut_and_has_grade_0(pool, command):
    hang = ToolCall("shell", {"command": command})
    policy = CountingPolicy([hang, FINISH])
    episode = asyncio.run(asyncio.wait_for(play(policy, pool, seconds=0.5), 15))
    assert (episode.outcome, episode.reward, episode.parts) == ("out_of_time", 0.0, {})
    assert episode.detail == "tools and harness took longer than 0.5 s (agent.episode_seconds)"
    assert policy.seeds == [7], "no further attempt"
    assert sampled_calls(episode) == [hang] and episode.turns == 1
    assert episode.usage.call_tokens == episode.transcript.total_sampled > 0


def test_a_command_that_kills_its_sandbox_twice_has_grade_0(bare_pool):
    policy = CountingPolicy([KILL, FINISH])
    episode = asyncio.run(play(policy, bare_pool))
    assert (episode.outcome, episode.reward, episode.parts) == ("killed_sandbox", 0.0, {})
    assert episode.detail.startswith("2 sandboxes died under the same command, the last one: ")
    assert policy.seeds == [7] and sampled_calls(episode) == [KILL]
    assert episode.usage.calls == {"shell": 1}


def test_a_submission_that_kills_the_sandbox_of_its_grader_has_grade_0(bare_pool):
    policy = CountingPolicy([FINISH])
    episode = asyncio.run(play(policy, bare_pool, KILLS_GRADER))
    assert (episode.outcome, episode.reward, policy.seeds) == ("killed_sandbox", 0.0, [7])
    assert episode.detail.startswith("grading: 2 sandboxes died under the same command")


# -- what the infrastructure loses ------------------------------------------------------------------------------


def test_one_death_under_each_of_two_commands_changes_no_grade(bare_pool, tmp_path):
    """The files outside the sandbox remember that a command has killed one already."""
    calls = [
        ToolCall("shell", {"command": f"test -e {tmp_path}/{n} || {{ touch {tmp_path}/{n}; kill -9 $PPID; }}"})
        for n in range(2)
    ]
    policy = CountingPolicy([*calls, FINISH])
    episode = asyncio.run(play(policy, bare_pool))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert (episode.outcome, episode.reward, policy.seeds) == ("finished", 1.0, [7])


@pytest.mark.parametrize(("calls", "files"), [([SHELL, FINISH], {}), ([FINISH], RIGHT)], ids=["tool", "grading"])
def test_an_outage_leaves_no_reward_whatever_the_command(pool, calls, files):
    policy = CountingPolicy(calls)
    episode = asyncio.run(play(policy, DyingPool(pool, range(99)), files))
    assert (episode.outcome, episode.reward) == ("infrastructure", None)
    assert len(policy.seeds) == len(set(policy.seeds)) == 3


# -- which seconds count ----------------------------------------------------------------------------------------


class SlowPool:
    """Sandboxes take `acquire_s` to come, and their commands 10 s each."""

    limits, workspace_paths = SandboxLimits(), ("/workspace",)
    capabilities = SimpleNamespace(has_writable_system=False)

    def __init__(self, acquire_s):
        self.acquire_s, self.trees = acquire_s, self

    async def get(self, folder):
        await asyncio.sleep(self.acquire_s)

    async def acquire(self, files, tree, **_):
        await asyncio.sleep(self.acquire_s)
        return SlowSandbox()


class SlowSandbox:
    tmp_is_empty, jobs = True, 0

    async def shell(self, command, timeout_s):
        await asyncio.sleep(10)
        return RunResult("ok", 0, "done", "", 10.0, 0)

    async def changes(self):
        return {}

    async def apply(self, changes):
        pass

    async def close(self):
        pass


WAITING = ToolCall("wait", {"seconds": 10})


@pytest.fixture
def timed(monkeypatch):
    """Plays calls on a virtual clock; returns the episode and the seconds that passed."""

    async def grade(*_):
        await asyncio.sleep(1000)  # grading has limits of its own
        return Grade(1.0, {"hidden": 1.0}, "")

    monkeypatch.setattr(harness, "grade", grade)

    def run(calls, seconds, open_s=0.0, sample_s=0.0, acquire_s=0.0):
        async def timed_play():
            policy = CountingPolicy(calls, open_s, sample_s)
            episode = await play(policy, SlowPool(acquire_s), {}, seconds, ("tests.rl.test_causes:WAIT",))
            assert policy.seeds == [7]
            return episode, asyncio.get_running_loop().time()

        return run_virtually(timed_play())

    return run


@pytest.mark.parametrize(("wait", "times"), [("", 0), ("open_s", 1), ("sample_s", 3), ("acquire_s", 3)])
def test_seconds_of_tools_add_up_and_waiting_for_the_infrastructure_does_not_count(timed, wait, times):
    """Tool calls of 10 s within a limit of 25 s, beside waits that are longer: the third call is cut after 5 s."""
    waits = {wait: 500.0} if wait else {}
    episode, seconds = timed([SHELL, WAITING, FINISH], 25.0, **waits)
    assert (episode.outcome, episode.reward) == ("finished", 1.0)
    assert seconds == pytest.approx(500 * times + 20 + 1000)
    episode, seconds = timed([SHELL, WAITING, SHELL, FINISH], 25.0, **waits)
    assert (episode.outcome, episode.reward, episode.turns) == ("out_of_time", 0.0, 3)
    assert seconds == pytest.approx(500 * times + 25)
