"""Whether the cache of a sampler fits into what the weights leave of its devices' memory, where that is known."""

import math

from jax.sharding import Mesh

from composer_jax.errors import UserError
from composer_jax.models.cache import abstract_cache
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.chips import GIB
from composer_jax.parallel.processes import min_of_mesh
from composer_jax.parallel.sharding import bytes_per_device
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sequence import Limits


def require_room(definition: ModelDef, mesh: Mesh, config: SamplerConfig, limits: Limits) -> None:
    """Compares the cache, which is not made yet, with the free memory of the mesh's devices.

    What the programs of the sampler need beside weights and cache is not counted. On devices that do not tell their
    memory, such as CPUs, nothing is compared. On a mesh of several processes, all of them call it and decide the same.

    Args:
      definition: with the cache of the sampler.
      mesh, limits: of one engine. config: of the sampler, whose numbers are those of all engines together.

    Raises:
      UserError: the cache does not fit; the sentence names the largest sampler.cache_tokens that would by itself.
    """
    free = free_memory(mesh)
    if free is None:
        return
    cache = abstract_cache(definition.config, mesh, limits.cache_pages, limits.page_size)
    needed = bytes_per_device(cache)
    if needed <= free:
        return
    pages = int(free * limits.cache_pages // needed) - limits.spare_pages
    shards = config.slots // limits.rows  # of all engines
    fits = (
        f"use less than {shards * pages * limits.page_size}; programs, and updates of the weights while it serves, "
        "need room as well"
    )
    if pages < limits.most_pages(config.max_model_len):
        fits = (
            f"not even one context of sampler.max_model_len={config.max_model_len} fits on each device: use a smaller "
            "one, or more devices"
        )
    default = "" if config.cache_tokens else f", for {config.slots} slots of {config.max_model_len} tokens"
    raise UserError(
        f"A cache of sampler.cache_tokens={config.cache_tokens or config.slots * config.max_model_len}{default} takes "
        f"{needed / GIB:.2f} GiB of each device, and {free / GIB:.2f} GiB of {mesh.local_devices[0].device_kind} are "
        f"free beside the weights; {fits}."
    )


def free_memory(mesh: Mesh) -> float | None:
    """Returns the bytes that JAX may still use of a mesh's fullest device; None where no device tells them."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    free = min((float(of["bytes_limit"] - of["bytes_in_use"]) for of in stats if "bytes_limit" in of), default=math.inf)
    if mesh.is_multi_process:
        free = min_of_mesh(mesh, free)
    return free if math.isfinite(free) else None
