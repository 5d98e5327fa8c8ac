"""What the tests of the demo share with those of the agent, and how often the bug-fixing expert slips."""

from functools import partial

import pytest

from composer_jax.demo import expert
from composer_jax.demo.bugfix_expert import bugfix_script, notes_script
from tests.agent.conftest import chat_format, pool, scripted_session, tok

__all__ = ["chat_format", "pool", "scripted_session", "slip_rate", "tok"]


@pytest.fixture
def slip_rate(monkeypatch):
    """Sets the probabilities of the experts' slips: of calls without effect, and of wrong repairs."""

    def set_rates(slip: float, wrong: float = 0.0) -> None:
        monkeypatch.setattr(expert, "bugfix_script", partial(bugfix_script, slip=slip, wrong=wrong))
        monkeypatch.setattr(expert, "notes_script", partial(notes_script, slip=slip))

    return set_rates
