"""EngineWeights: the same version of the weights in all engines of a sampler, each of which has a copy of its own.

An engine is the devices of one replica of the sampler's mesh. The conversion of the learner's weights (cast, 8 bits,
another layout) is one program on the whole mesh, compiled once. Each engine then takes the shards that lie on its
devices; nothing is copied for that.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from composer_jax.models.model_def import ModelDef, Params
from composer_jax.sampler.host_weights import is_on_host
from composer_jax.sampler.rollout_weights import RolloutWeights
from composer_jax.sampler.runner import Runner
from composer_jax.sampler.weight_checksums import WeightChecksums


def engine_meshes(mesh: Mesh) -> list[Mesh]:
    """Returns the mesh of each engine of a sampler: the devices of one replica, which have one copy of the weights."""
    parts = np.split(mesh.devices, mesh.shape["replica"], mesh.axis_names.index("replica"))
    return [mesh] if len(parts) == 1 else [Mesh(part, mesh.axis_names, axis_types=mesh.axis_types) for part in parts]


class EngineWeights:
    """Installs weights in the runners of all engines. Every process of the mesh calls it, in the same order."""

    def __init__(self, definition: ModelDef, mesh: Mesh, runners: Sequence[Runner]) -> None:
        """
        Args:
          definition: of the sampler's weights (rollout_model_def).
          mesh: of the sampler. runners: of its engines, made for engine_meshes(mesh).
        """
        self.version = -1
        """Of the weights in all engines; -1: none."""
        self._runners, self._rollout_weights = runners, RolloutWeights(definition, mesh)
        self._here = [runner for runner in runners if runner.is_here]
        self.learner_checksums = runners[0].checksum_program.of_learner

    @property
    def checksums(self) -> WeightChecksums:
        """Those of the installed weights; none before the first."""
        installed = self._here[0].installed
        return () if installed is None else installed[1]

    def install(
        self,
        params: Params,
        router_bias: Params,
        version: int,
        *,
        copy: bool,
        checksums: WeightChecksums | None = None,
    ) -> None:
        """Installs weights of a learner in all engines, while none of their device calls is outstanding.

        The arguments are those of Runner.install. Raises what it raises; the old weights stay in all engines then.
        Where an engine refuses weights that another one has taken, because its devices hold other bits or lack room,
        no engine keeps any weights, and `version` is -1. HostTensors (host_weights.py) leave none after any error. Over
        several processes this holds in the process that raises; the others learn of it when it ends.
        """
        if len(self._runners) == 1 or is_on_host(params):
            try:
                for runner in self._here:
                    runner.install(params, router_bias, version, copy=copy, checksums=checksums)
            except Exception:
                if is_on_host(params):
                    self.release()
                raise
            self.version = version
            return
        checksums = self.learner_checksums(params) if checksums is None else checksums
        weights = self._rollout_weights.to_rollout(params, router_bias, copy=copy)
        for number, runner in enumerate(self._here):
            ours, bias = _shards_on(runner.mesh, weights)
            try:
                runner.install(ours, bias, version, copy=False, checksums=checksums)
            except Exception:
                if number:
                    self.release()
                del weights, ours, bias  # the traceback would keep their memory
                raise
        self.version = version

    def release(self) -> None:
        """Frees weights and caches of all engines."""
        for runner in self._runners:
            runner.release()
        self.version = -1


def _shards_on(mesh: Mesh, weights: Any) -> Any:
    """Returns a pytree of arrays on the sampler's mesh as arrays on the mesh of one engine, made of the same shards."""

    def take(array: jax.Array) -> jax.Array:
        assert isinstance(array.sharding, NamedSharding), "the weights lie on the sampler's mesh"
        sharding = NamedSharding(mesh, array.sharding.spec)
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        here = [shards[device] for device in sharding.addressable_devices_indices_map(array.shape)]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, here)

    return jax.tree.map(take, weights)
