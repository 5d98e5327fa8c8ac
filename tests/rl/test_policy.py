"""The Policy protocol: a scripted policy plays a group of episodes, and a suite, through real sandboxes."""

import asyncio

import pytest

from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.evals.suite import Suite, run_suite
from composer_jax.rl.rollout import roll_out
from composer_jax.sampler.policy import Policy, TrainablePolicy
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Task
from tests.rl.scripted_policy import ScriptedPolicy

FIX = ToolCall("edit", {"path": "price.py", "old": "a + b", "new": "a - b"})
FINISH = ToolCall("finish", {})
TASK = Task(
    "t",
    "family",
    "train",
    "price() must subtract.",
    {"price.py": "def price(a, b):\n    return a + b\n"},
    ("edit", "finish"),
    CaseGrader((Case("price", "price", (5, 2), 3),)),
)


@pytest.fixture(scope="module")
def environment():
    tokenizer = Tokenizer.train(["price() must subtract. a + b a - b edit finish path old new"] * 50, 400)
    pool = LocalSandboxPool(SandboxLimits(timeout_s=10), size=2)
    yield EpisodeContext(CompactFormat(tokenizer), pool)
    pool.kill()


@pytest.fixture
def policy(environment):
    """Repairs the function in sessions with an even seed only."""

    def script(seed):
        calls = [FIX, FINISH] if seed % 2 == 0 else [FINISH]
        return [environment.chat.render_assistant("", [call]) for call in calls]

    return ScriptedPolicy(script)


def test_a_scripted_policy_plays_a_group(environment, policy: TrainablePolicy):
    policy.update({}, {}, version=7)
    jobs = [EpisodeSpec(TASK, seed, Compaction(None)) for seed in range(4)]
    episodes = asyncio.run(roll_out(jobs, policy, environment))
    assert [episode.reward for episode in episodes] == [1.0, 0.0, 1.0, 0.0]
    assert [episode.turns for episode in episodes] == [2, 1, 2, 1]
    sampled = [node for episode in episodes for node in episode.transcript.nodes if len(node.sampled_tokens)]
    assert {version for node in sampled for version in node.versions} == {7}
    assert policy.decoded_tokens == sum(len(node.sampled_tokens) for node in sampled)


def test_a_scripted_policy_plays_a_suite(environment, policy: Policy):
    suite = Suite("repairs", [TASK], attempts=6, compaction=Compaction(None))
    solved = [job.seed % 2 == 0 for job in suite.specs()]
    result, episodes = asyncio.run(run_suite(suite, policy, environment))
    assert [episode.reward == 1.0 for episode in episodes] == solved
    assert result.pass_at_1 == pytest.approx(sum(solved) / 6)
