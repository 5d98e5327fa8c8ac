"""The weights that a server takes while it serves: from a folder of versions in place, from other addresses anew.

A server of several processes takes a version when each of them has its own parts of it in its host's memory: process 0
asks them to read, and installs what all of them have read, or nothing.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from absl import logging

from composer_jax.checkpoint.address import PATCHES_PREFIX
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.weight_chain import MissingVersion, WeightReceiver
from composer_jax.checkpoint.weight_shards import parts_here
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import Params
from composer_jax.parallel.processes import process_index
from composer_jax.sampler.host_weights import host_weights
from composer_jax.sampler.weight_checksums import (
    WeightChecksums,
    checked_weights,
    checksum_of_sums,
    require_equal,
    sums_of_part,
)

if TYPE_CHECKING:
    from composer_jax.sampler.sampler import Sampler
    from composer_jax.sampler.several_processes import UpdateMode

PartSums = tuple[str, tuple[int, ...], tuple[int, int]]
"""Name of a weight, first element of a part of it, and the part's share in the weight's checksum."""


class ServedWeights:
    """Installs weights in the sampler of a server. Callers do so one after another (Service.updating).

    Every process of the server has one. Process 0 calls it; `answer` and `of_version` are for the Sampler.follow of the
    others.

    Of a folder of versions it keeps in the host's memory what the devices of this process hold, as it was published:
    patches change published bits, and hashes are of them, but the devices have them in the server's dtype. It keeps
    those of one folder, the last that was installed from.
    """

    def __init__(
        self,
        sampler: Sampler,
        network: ModelConfig,
        dtype: str | None,
        *,
        mtp: bool,
        folder: str = "",
        receiver: WeightReceiver | None = None,
    ) -> None:
        """
        Args:
          network: as the first address of weights describes it.
          dtype, mtp: as of Checkpoint.load.
          folder, receiver: of the versions that the sampler has its weights from, if any (PublishedCheckpoint).
        """
        self._sampler, self._network, self._dtype, self._mtp = sampler, network, dtype, mtp
        weights = sampler.definition.abstract_weights(sampler.mesh)
        self._like: Params = dict(zip(("params", "router_bias"), weights, strict=True))
        self._folder, self._receiver = folder, receiver
        self._taken: int | None = None
        """The version that the sampler got from the receiver; it may have got another one from elsewhere since."""
        if receiver is not None:
            self._taken = sampler.version
            receiver.changed.clear()

    async def __call__(
        self,
        address: str,
        version: int,
        *,
        mode: UpdateMode = "recompute",
        checksums: WeightChecksums | None = None,
        anew: bool = False,
    ) -> None:
        """Installs the weights at an address as a version, while the sampler serves; of `patches:FOLDER` that version.

        Args:
          mode: what becomes of running requests (Sampler.update_serving).
          checksums: those that the weights must have.
          anew: reads a version of a folder in full instead of patching what was read of it.

        Raises:
          MissingVersion: the folder does not have the version.
          WeightMismatch: the weights have other checksums.
          UserError: there are none, they are those of another network, or the server has several processes and the
            address is not a folder of versions. What is served stays, whichever process could not read its parts.
          OtherProcessError: another process failed or is gone, which ends the server.
        """
        if not address.startswith(PATCHES_PREFIX):
            await self._install_anew(address, version, mode, checksums)
            return
        folder = address.removeprefix(PATCHES_PREFIX)
        expected = self._checksums(await self._receive_everywhere(folder, version, anew))
        if checksums is not None:
            require_equal(expected, checksums, version, (self._sampler.version, self._sampler.checksums))
        params, router_bias = self._take(version)
        await self._sampler.update_serving(params, router_bias, version, mode=mode, checksums=expected)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Reads the version that process 0 asks for; returns its sums of parts, or why it cannot be read."""
        try:
            return {"sums": self._receive(**question)}
        except Exception as error:  # also those of a storage's own client: the server goes on with what it has
            if not isinstance(error, UserError):
                logging.exception("the weights in %s cannot be read", question["folder"])
            reason = f"process {process_index()}: {error or type(error).__name__}"
            return {"error": reason, "is_missing": isinstance(error, MissingVersion)}

    def of_version(self, version: int) -> tuple[Params, Params]:
        """Returns the weights that were read for a version which process 0 installs, for this process."""
        assert self._receiver is not None and self._receiver.version == version, "process 0 has asked for this version"
        return self._take(version)

    async def _receive_everywhere(self, folder: str, version: int, anew: bool) -> list[PartSums]:
        """Makes every process read its parts of a version; returns the sums of all. Raises what one of them raised."""
        question = {"folder": folder, "version": version, "anew": anew}
        # Waits for all of them, also where one has failed: the next question must not meet answers to this one.
        here, answers = await asyncio.gather(
            asyncio.to_thread(self._receive, **question),
            self._sampler.ask_followers(question),
            return_exceptions=True,
        )
        for result in (answers, here):
            if isinstance(result, BaseException):
                raise result
        assert not isinstance(here, BaseException) and not isinstance(answers, BaseException)
        for answer in answers:
            if "error" in answer:
                raise (MissingVersion if answer["is_missing"] else UserError)(answer["error"])
        there = (part for answer in answers for part in answer["sums"])
        return here + [(name, tuple(start), tuple(sums)) for name, start, sums in there]

    async def _install_anew(
        self, address: str, version: int, mode: UpdateMode, checksums: WeightChecksums | None
    ) -> None:
        """Loads weights beside those that the devices have."""
        if self._sampler.mesh.is_multi_process:
            raise UserError(
                f"a server over several processes takes other weights from a folder of versions, not from {address}; "
                "publish them, and give patches:FOLDER."
            )

        def load() -> tuple[Params, Params]:
            checkpoint = open_checkpoint(address)
            if checkpoint.config != self._network:
                raise UserError(f"{address} has another network than the one that is served; start a server for it.")
            return checkpoint.load(self._sampler.mesh, self._dtype, mtp=self._mtp)[1:]

        params, router_bias = await asyncio.to_thread(load)
        await self._sampler.update_serving(params, router_bias, version, mode=mode, copy=False, checksums=checksums)
        self._receiver = self._taken = None  # the next patch is not one of these weights

    def _receive(self, folder: str, version: int, anew: bool) -> list[PartSums]:
        """Brings the parts of this process to a version; returns their share in the checksums of the served weights."""
        if anew or self._receiver is None or folder != self._folder:
            self._receiver = None  # before the next one takes as much memory
            self._folder, self._receiver = folder, WeightReceiver(folder, parts_here(self._like))
        self._receiver.receive(version)
        dtypes = {f"params/{name}": weight.dtype for name, weight in self._checked().items()}
        return [
            (shard.name, shard.start, sums_of_part(part.astype(dtypes[shard.name], copy=False), shard.start))
            for shard, part in self._receiver.parts.items()
            if shard.name in dtypes
        ]

    def _take(self, version: int) -> tuple[Params, Params]:
        """Returns what was received, for an update of the sampler to this version."""
        receiver = self._receiver
        assert receiver is not None, "a version was received"
        changed = receiver.changed if self._sampler.version == self._taken else None
        tree = host_weights(receiver.parts, self._like, changed)
        receiver.changed, self._taken = set(), version
        return tree["params"], tree["router_bias"]

    def _checksums(self, sums_of_parts: Iterable[PartSums]) -> WeightChecksums:
        """Returns the checksums of whole weights; of equal parts, several processes have the same sums."""
        by_name: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {}
        for name, start, sums in sums_of_parts:
            by_name.setdefault(name, {})[start] = sums
        checked = self._checked()
        return tuple(checksum_of_sums(name, checked[name], by_name[f"params/{name}"].values()) for name in checked)

    def _checked(self) -> dict[str, Any]:
        """Returns shapes and dtypes of the weights whose checksums are compared."""
        definition = self._sampler.definition
        return {
            name: functools.reduce(lambda node, key: node[key], name.split("/"), self._like["params"])
            for name in checked_weights(definition)
        }
