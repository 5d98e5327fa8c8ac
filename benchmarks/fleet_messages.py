"""MessageLog: which messages a learner asks engines for, as the frames between them say: a part of benchmarks.fleet."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

Message = tuple[int, int, int]
"""Seed of the session, branch, tokens of the context."""
Call = tuple[str, int, int]
"""Name of the engine, number of the connection, number of the call."""


class MessageLog:
    """What passes between a learner and its engines.

    Attributes:
      kills: so far. A message that a connection still owes when it ends was lost by the last kill, and so was an answer
        that the other end had no time to keep. There may be further kills before the message is asked for again.
      asked: how often each message was asked for.
      again: (number of the kill that lost the answer, from 1; seed) -> messages that were asked for again.
      owed: messages that engines have been asked for and have not answered yet.
      changed: set after every frame that changes what is asked or owed; whoever waits for it clears it.
    """

    def __init__(self) -> None:
        self.kills = 0
        self.asked: Counter[Message] = Counter()
        self.again: Counter[tuple[int, int]] = Counter()
        self.owed: dict[Call, Message] = {}
        self.changed = asyncio.Event()
        self._lost: dict[Message, int] = {}
        self._answered: dict[tuple[str, int], list[Message]] = {}
        self._opening: dict[Call, int] = {}
        self._seeds: dict[Call, int] = {}

    def note(self, engine: str, connection: int, is_of_learner: bool, header: dict[str, Any], n: int) -> None:
        """Watches the relay of an engine (fleet_relay.Watch)."""
        if not is_of_learner:
            self._note_reply((engine, connection, header.get("reply")), header)
        elif header.get("method") == "open":
            self._opening[engine, connection, header["call"]] = header["body"]["seed"]
        elif header.get("method") == "sample":
            call = engine, connection, header["call"]
            self._note_message(call, header["body"], header["arrays"][0][1][0])
        elif "cancel" in header:
            self._lose([(engine, connection, header["cancel"])])

    def note_end(self, engine: str, connection: int) -> None:
        """Notes that a connection has ended, over which nothing is owed any more."""
        self._lost |= dict.fromkeys(self._answered.pop((engine, connection), ()), self.kills)
        self._lose([call for call in self.owed if call[:2] == (engine, connection)])

    def owes(self, engine: str | None = None) -> bool:
        """Returns whether an engine owes a message; None: any of them."""
        return any(engine in (None, call[0]) for call in self.owed)

    def _lose(self, calls: Sequence[Call]) -> None:
        lost = [message for call in calls if (message := self.owed.pop(call, None)) is not None]
        self._lost |= dict.fromkeys(lost, self.kills)
        self.changed.set()

    def _note_reply(self, call: tuple[str, int, Any], header: dict[str, Any]) -> None:
        if (seed := self._opening.pop(call, None)) is not None and "body" in header:
            self._seeds[*call[:2], header["body"]["session"]] = seed
        if message := self.owed.pop(call, None):
            self._answered.setdefault(call[:2], []).append(message)
            self.changed.set()

    def _note_message(self, call: Call, body: dict[str, Any], new_tokens: int) -> None:
        if body["params"]["prompt_logprobs"]:
            return  # of the weight check
        seed = self._seeds[*call[:2], body["session"]]
        message = seed, body["branch"], body["start"] + new_tokens
        if self.asked[message]:
            self.again[self._lost.get(message, self.kills), seed] += 1
        self.asked[message] += 1
        self.owed[call] = message
        self.changed.set()
