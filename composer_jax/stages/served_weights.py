"""New weights for a server: from an address, or from the versions that a trainer publishes (weight_chain.py)."""

import asyncio
from typing import Any

import jax
import numpy as np

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.weight_chain import WeightReceiver
from composer_jax.checkpoint.weight_shards import as_tree
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.sampler.engine import Sampler

PATCHES = "patches:"
"""Begins the address of a folder of versions."""


class ServedWeights:
    """Reads (params, router_bias) for the sampler of a server.

    Of a folder of versions it keeps the last one in the host's memory, to which it applies patches in place.
    """

    def __init__(self, sampler: Sampler, network: ModelConfig, dtype: str | None, *, mtp: bool) -> None:
        """network: as the first address of weights describes it. dtype, mtp: as of Checkpoint.load."""
        self._sampler, self._network, self._dtype, self._mtp = sampler, network, dtype, mtp
        self._receivers: dict[str, WeightReceiver] = {}

    async def __call__(self, address: str, version: int) -> tuple[Any, Any]:
        """Returns the weights at an address; of `patches:FOLDER` those of the version.

        Raises:
          UserError: there are none, or they are those of another network.
        """
        return await asyncio.to_thread(self._read, address, version)

    def _read(self, address: str, version: int) -> tuple[Any, Any]:
        if address.startswith(PATCHES):
            folder = address.removeprefix(PATCHES)
            receiver = self._receivers.setdefault(folder, WeightReceiver(folder))
            receiver.receive(version)
            params, router_bias = self._sampler.definition.shapes()
            tree = as_tree(receiver.arrays, {"params": params, "router_bias": router_bias})
            tree = jax.tree.map(np.copy, tree)  # the next patch changes the receiver's arrays
            return tree["params"], tree["router_bias"]
        checkpoint = open_checkpoint(address)
        if checkpoint.config != self._network:
            raise UserError(f"{address} has another network than the one that is served; start a server for it.")
        _, params, router_bias = checkpoint.load(self._sampler.mesh, self._dtype, mtp=self._mtp)
        return params, router_bias
