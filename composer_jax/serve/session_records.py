"""SessionRecords: what sessions really saw and sampled, so that a foreign harness can be trained from it."""

import time
from collections import OrderedDict, deque
from typing import Any

from composer_jax.sampler.policy import Sample

MOST_SESSIONS, MOST_TOKENS = 4096, 16 << 20
"""Recorded at once, prompts included; what is oldest in the session used least recently is forgotten first."""


class SessionRecords:
    """The requests of each session, in the order in which they ended."""

    def __init__(self, most_sessions: int = MOST_SESSIONS, most_tokens: int = MOST_TOKENS) -> None:
        self._most_sessions, self._most_tokens = most_sessions, most_tokens
        self._sessions: OrderedDict[str, deque[dict[str, Any]]] = OrderedDict()
        self._owners: dict[str, str] = {}
        self._tokens = 0

    def owner(self, session: str) -> str | None:
        """Returns the API key of the client whose session this is, or None."""
        return self._owners.get(session)

    def add(self, session: str, owner: str, prompt: list[int], sample: Sample) -> None:
        """Records a request."""
        turn = {
            "prompt_token_ids": prompt,
            "token_ids": sample.tokens,
            "logprobs": sample.logprobs,
            "raw_logprobs": sample.raw_logprobs,
            "weight_versions": sample.versions,
            "finish_reason": sample.finish_reason,
            "cached_tokens": sample.cached,
            "time": time.time(),
        }
        self._sessions.setdefault(session, deque()).append(turn)
        self._sessions.move_to_end(session)
        self._owners[session] = owner
        self._tokens += _size(turn)
        while len(self._sessions) > self._most_sessions:
            self.forget(next(iter(self._sessions)))
        while self._tokens > self._most_tokens:
            oldest = next(iter(self._sessions))
            self._tokens -= _size(self._sessions[oldest].popleft())
            if not self._sessions[oldest]:
                self.forget(oldest)

    def get(self, session: str) -> list[dict[str, Any]] | None:
        """Returns the requests of a session, or None."""
        turns = self._sessions.get(session)
        return None if turns is None else list(turns)

    def forget(self, session: str) -> bool:
        """Drops a session; returns whether there was one."""
        turns = self._sessions.pop(session, None)
        self._owners.pop(session, None)
        self._tokens -= sum(map(_size, turns or ()))
        return turns is not None

    def ids(self) -> list[str]:
        """Returns the recorded sessions, the one that was used last at the end."""
        return list(self._sessions)


def _size(turn: dict[str, Any]) -> int:
    return len(turn["prompt_token_ids"]) + len(turn["token_ids"])
