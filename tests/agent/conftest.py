"""Fixtures of the agent's tests: real sandboxes, a tokenizer, scripted sessions."""

import pytest

from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.demo.prompts import REQUESTS
from composer_jax.sampler.policy import Sample
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Task
from tests.coroutine_tests import pytest_pyfunc_call  # noqa: F401  # a hook
from tests.demo.generate import generate


@pytest.fixture(scope="session")
def pool():
    pool = LocalSandboxPool(SandboxLimits(timeout_s=10), size=8)
    yield pool
    pool.kill()


class DyingPool:
    """A pool that records its sandboxes; those in `deaths` (counted from 0) are dead when they are acquired."""

    def __init__(self, pool, deaths):
        self.pool = pool
        self.deaths = deaths
        self.sandboxes = []

    async def acquire(self, *arguments, **options):
        sandbox = await self.pool.acquire(*arguments, **options)
        if len(self.sandboxes) in self.deaths:
            sandbox.end("a test ended it")
        self.sandboxes.append(sandbox)
        return sandbox

    def __getattr__(self, name):
        return getattr(self.pool, name)


@pytest.fixture
def dying_pool(pool):
    return lambda deaths: DyingPool(pool, deaths)


def task_of(files, **options):
    """A task whose workspace holds these files, with other fields of Task as options."""
    return Task("t", "family", "train", "Do it.", files, (), CaseGrader((Case("a", "f", (), None),)), **options)


@pytest.fixture(scope="session")
def tok():
    texts = [*REQUESTS.values()] + ['edit{"path":"old":"new":"return x"}', "run_tests{}", "FAIL is, want"] * 50
    for index in range(300):
        for family in ("bugfix", "memory_chain"):
            task = generate(family, "train", 0, index)
            texts += [
                task.instruction,
                *(text for path, text in task.files.items() if path != "run_tests.py"),
            ]
    return Tokenizer.train(texts, 800)


@pytest.fixture(scope="session")
def chat_format(tok):
    return CompactFormat(tok)


class ScriptedSession:
    """A session that samples scripted messages (lists of ids) and records its contexts."""

    def __init__(self, messages, max_model_len=4096):
        self.messages = list(messages)
        self.max_model_len = max_model_len
        self.context, self.branch = [], 0
        self.contexts = []  # the context before each message
        self.max_tokens = []  # of each message
        self.temperatures = []  # of each message

    async def sample(self, context, params, branch=0):
        max_tokens = params.max_tokens
        assert branch > self.branch or context[: len(self.context)] == self.context, "an undeclared break of the prefix"
        self.context, self.branch = list(context), branch
        assert len(self.context) + max_tokens <= self.max_model_len
        self.contexts.append(list(self.context))
        self.max_tokens.append(max_tokens)
        self.temperatures.append(params.temperature)
        ids = self.messages.pop(0)
        tokens = list(ids)[:max_tokens]
        self.context += tokens
        number = len(self.contexts)
        return Sample(
            tokens,
            [-0.1 * number] * len(tokens),
            [number] * len(tokens),
            "stop" if len(tokens) == len(ids) else "length",
        )

    def close(self):
        pass


@pytest.fixture
def scripted_session():
    return ScriptedSession
