"""A server that follows a folder of versions by itself: the newest one, or the one that its arm serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from absl import logging

from composer_jax.checkpoint.address import PATCHES_PREFIX
from composer_jax.checkpoint.weight_chain import ARMS, ChainFiles, MissingVersion
from composer_jax.errors import UserError

if TYPE_CHECKING:  # the packages of the server are optional
    from starlette.applications import Starlette

    from composer_jax.sampler.several_processes import UpdateMode
    from composer_jax.serve.service import Service

POLL_S = 2.0
"""Seconds from one look at the folder to the next."""
LONGEST_S = 60.0
"""Most seconds between two looks, after a version was refused again and again."""


def version_to_serve(folder: str, arm: str) -> int | None:
    """Returns the version that an arm serves, or without an arm the newest; None while there is none.

    Raises:
      UserError: the folder names no version for the arm.
    """
    files = ChainFiles(folder)
    if not arm:
        return max(files.versions(), default=None)
    try:
        version = json.loads(files.read(ARMS))[arm]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} has no {ARMS} with a version for the arm {arm!r} ({error}); begin a release "
            "(launch.traffic begin), or leave --arm out."
        ) from error
    return int(version)


class WeightFollower:
    """Installs the versions of a folder in a server as they come, by the way of POST /update_weights.

    A version that cannot be installed leaves the server where it is; /health then has the reason as "refused".
    """

    def __init__(
        self,
        service: Service,
        folder: str,
        arm: str = "",
        *,
        serves_other: bool = False,
        mode: UpdateMode = "recompute",
    ) -> None:
        """
        Args:
          arm: "anchor" or "candidate" of a release; "" follows the newest version.
          mode: what becomes of running requests (Sampler.update_serving).
          serves_other: the server began with weights from elsewhere, whose version 0 is none of the folder's.
        """
        self._service, self._folder, self._arm, self._serves_other = service, folder, arm, serves_other
        self._mode: UpdateMode = mode
        assert service.install_weights is not None, "the service takes other weights"
        self._install_weights = service.install_weights
        self._own = service.sampler.version
        """What the server had at its beginning, or got here last; it serves another one that somebody has pushed."""
        self._bad: tuple[int | None, str] = (None, "")
        """The version that was refused though it is there, and why; it is not read again until another was wanted."""
        service.health |= {"follows": f"{PATCHES_PREFIX}{folder}", "arm": arm, "refused": ""}

    async def run(self) -> None:
        """Follows until it is cancelled, or the engine has ended."""
        wait = POLL_S
        while self._service.sampler.error is None:
            is_well = await self.look()
            wait = POLL_S if is_well else min(2 * wait, LONGEST_S)
            await asyncio.sleep(wait * random.uniform(0.75, 1.25))  # not all servers at once

    async def look(self) -> bool:
        """Installs the version that is to be served, if it is another one; returns whether nothing was refused.

        Cancelling a caller, such as a learner that is lost, does not cancel the installation.
        """
        return await asyncio.shield(asyncio.ensure_future(self._look()))

    async def _look(self) -> bool:
        try:
            version = await asyncio.to_thread(version_to_serve, self._folder, self._arm)
            if version is not None:
                await self._install(version)
        except Exception as error:  # also those of a storage's own client: the server goes on with what it has
            if not isinstance(error, UserError):
                logging.exception("the weights in %s cannot be followed", self._folder)
            return self._note(str(error) or type(error).__name__)
        return self._note("")

    async def reload(self) -> None:
        """Installs the version that is to be served, whatever the server has, also one of the same or a higher number.

        A trainer that goes on from a checkpoint publishes the versions after it once more, with other weights.

        Raises UserError if there is none, or it cannot be installed. Cancelling a caller does not cancel it.
        """
        await asyncio.shield(asyncio.ensure_future(self._reload()))

    async def _reload(self) -> None:
        async with self._service.updating:
            version = await asyncio.to_thread(version_to_serve, self._folder, self._arm)
            if version is None:
                raise UserError(f"{self._folder} has no version of the weights; publish one.")
            await self._install_weights(f"{PATCHES_PREFIX}{self._folder}", version, anew=True)
            self._serves_other, self._own, self._bad = False, version, (None, "")

    async def _install(self, version: int) -> None:
        async with self._service.updating:
            served = self._service.sampler.version
            if version != self._bad[0]:
                self._bad = (None, "")
            if version == served and not self._serves_other:
                self._own = version
                return
            if version < served and not await self._is_foreign(served):
                raise UserError(f"version {version} is below version {served}, which is served; versions rise.")
            if version == self._bad[0]:
                raise UserError(self._bad[1])
            try:
                await self._install_weights(f"{PATCHES_PREFIX}{self._folder}", version, mode=self._mode)
            except MissingVersion:  # it may still come
                raise
            except UserError as error:
                self._bad = (version, str(error))
                raise
            self._serves_other, self._own = False, version

    async def _is_foreign(self, served: int) -> bool:
        """Returns whether what is served was pushed with a number above all of the folder, so that it is none of it.

        The next versions of the folder would be below it: also the one that a rollback publishes.
        """
        versions = await asyncio.to_thread(ChainFiles(self._folder).versions, is_complete=False)
        return served != self._own and served > max(versions, default=-1)

    def _note(self, refused: str) -> bool:
        if refused and refused != self._service.health["refused"]:
            logging.warning("%s The server goes on with version %d.", refused, self._service.sampler.version)
        self._service.health["refused"] = refused
        return not refused


def run_while_serving(app: Starlette, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Makes an application run a coroutine between its start and its end, such as that of a WeightFollower."""
    serving = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[Any]:
        async with serving(application) as state:
            task = asyncio.create_task(run())
            try:
                yield state
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    app.router.lifespan_context = lifespan
