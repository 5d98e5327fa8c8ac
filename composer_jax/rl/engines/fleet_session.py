"""FleetSession: a Session on one engine, and on another one when that is lost.

A draw is a function of the session's seed, the branch and the token's position. So a message that is sampled again, on
an engine with equal weights, has the same tokens; with other weights it has those of a session that goes on with them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import logging

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.rl.engines.check_sample import BadSample, check_sample
from composer_jax.rl.engines.connection import EngineConnection
from composer_jax.rl.workers.channel import ChannelClosed, RemoteError
from composer_jax.rl.workers.remote_policy import RemoteSession
from composer_jax.sampler.policy import Sample

if TYPE_CHECKING:
    from composer_jax.rl.engines.fleet import FleetPolicy

MOST_FAILURES = 3
"""Attempts at one message at which an engine answers with an error, before the error is that of the policy."""
SESSIONS = 0
"""An engine has all sessions of a learner under one number of an episode (rl/workers/served_episode.py)."""


async def _open(connection: EngineConnection, seed: int, ahead: bool) -> RemoteSession:
    """Opens a session of an engine; one that is cancelled is closed when the engine has opened it."""

    async def call() -> RemoteSession:
        header, _ = await connection.channel.call("open", {"seed": seed, "ahead": ahead})
        return RemoteSession(connection.channel, SESSIONS, header["session"], header["max_model_len"])

    opening = asyncio.create_task(call())
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opening: asyncio.Task[RemoteSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class FleetSession:
    """A Session (sampler/policy.py) of a FleetPolicy."""

    def __init__(self, fleet: FleetPolicy, seed: int, least_version: int) -> None:
        """least_version: of the weights of engines on which it opens."""
        self.max_model_len = fleet.required.max_model_len
        self._fleet, self._seed, self._least_version = fleet, seed, least_version
        self._connection: EngineConnection | None = None
        self._remote: RemoteSession | None = None
        self._closed = False

    async def connect(self, *, ahead: bool, connection: EngineConnection | None = None) -> RemoteSession:
        """Opens the session on an engine, if it is open on none; waits while none has room.

        connection: the engine to try first; None takes the least loaded one.
        """
        while self._remote is None:
            if connection is not None:
                connection.opening += 1
            else:
                connection = await self._fleet.router.acquire(self._least_version, ahead=ahead)
            try:
                self._remote = await _open(connection, self._seed, ahead)
                self._connection = connection
                connection.open_sessions += 1
            except ChannelClosed:
                connection, lost = None, connection
                lost.opening -= 1
                continue
            except BaseException:
                connection.opening -= 1
                raise
            connection.opening -= 1
            self._fleet.router.assign()
        return self._remote

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """See Session.sample. Raises UserError or RemoteError if engines refuse or fail at it again and again."""
        if self._closed:
            raise RuntimeError("this session is closed")
        room = self.max_model_len - len(context)
        if room < 1:
            raise ValueError(f"{len(context)} tokens leave no room in a context of {self.max_model_len}")
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
        failures = 0
        while True:
            remote = await self.connect(ahead=True)
            connection = self._connection
            assert connection is not None, "an open session has a connection"
            try:
                with connection.message(), self._fleet.message():
                    sample = await remote.sample(context, params, branch=branch)
                self._check(sample, context, params, connection)
                return sample
            except UserError as error:
                raise UserError(f"engine {connection.description.name}: {error}") from error
            except ChannelClosed as error:
                reason = str(error)
            except BadSample as error:
                reason = f"it has answered with {error}"
                if link := self._fleet.link_of(connection):
                    link.refuse(reason)
            except RemoteError as error:
                failures, reason = failures + 1, str(error)
                if failures == MOST_FAILURES:
                    raise RemoteError(f"engine {connection.description.name}: {error}") from error
            self._leave()
            self._fleet.resampled += 1
            logging.info("A message of engine %s is sampled again: %s.", connection.description.name, reason)

    def close(self) -> None:
        """See Session.close."""
        self._closed = True
        self._leave()
        self._fleet.router.assign()

    def _leave(self) -> None:
        if self._remote is not None and self._connection is not None:
            self._remote.close()
            self._connection.open_sessions -= 1
        self._remote = self._connection = None

    def _check(
        self, sample: Sample, context: Sequence[int], params: SamplingParams, connection: EngineConnection
    ) -> None:
        if sample.finish_reason == "cancelled":
            raise RemoteError("somebody has ended its requests")
        check_sample(
            sample,
            context,
            params,
            vocab_size=self._fleet.vocab_size,
            versions=range(self._least_version, self._fleet.version + 1),
            route_shape=self._fleet.required.route_shape,
            n_experts=self._fleet.required.n_experts,
        )
