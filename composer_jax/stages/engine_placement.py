"""Where the engines of an RL run are (rl.engines), and what those are started with that Ray places."""

from composer_jax.checkpoint.folder import Folder
from composer_jax.errors import UserError
from composer_jax.rl.engines.config import engine_addresses
from composer_jax.rl.engines.engine_places import EnginePlaces, ListedEngines
from composer_jax.rl.engines.engine_process import EngineCommand
from composer_jax.rl.engines.ray_engines import RayEngines
from composer_jax.rl.workers.ray_cluster import EngineShare
from composer_jax.sampler.config import SamplerConfig
from composer_jax.schema.run_config import RunConfig
from composer_jax.stages.rollout_workers import RolloutWorkersOptions


def engine_places(config: RunConfig, workers: RolloutWorkersOptions | None) -> EnginePlaces:
    """Returns the places of the engines of a run, none of which is started yet.

    workers: of the run; their cluster has the engines of rl.engines="ray", and their token lets learners in.

    Raises UserError for rl.engines="ray" without a cluster, or with a sampler.mesh that no single node can have.
    """
    if config.rl.engines != "ray":
        return ListedEngines(engine_addresses(config.rl.engines))
    if workers is None or workers.cluster is None:
        raise UserError(
            "rl.engines='ray' starts engines on the nodes of a Ray cluster, and the run has none; run launch.rl with "
            "--cluster=auto or --cluster=HOST:PORT, or list the HOST:PORT of engines that you start yourself."
        )
    command = EngineCommand(_absolute(config.rl.publish), _serve_options(config), workers.token)
    return RayEngines(workers.cluster, engine_share(config), command)


def engine_share(config: RunConfig) -> EngineShare:
    """Returns what the engines of a run take of the nodes of a Ray cluster. Raises UserError as `engine_places`."""
    if config.rl.engines != "ray":
        return EngineShare()
    devices = 1
    for size in _axes(config.sampler).values():
        devices *= size
    return EngineShare(devices, config.rl.fleet.cpu_nodes)


def _axes(sampler: SamplerConfig) -> dict[str, int]:
    """Returns the sizes of an engine's mesh, without `replica`: there are as many engines as nodes have room for."""
    sizes = {} if sampler.mesh is None else sampler.mesh.axis_sizes
    for axis, size in sizes.items():
        if size == -1 and axis != "replica" or size > 1 and axis in ("replica", "context"):
            allowed = "1" if axis in ("replica", "context") else "a number of devices"
            raise UserError(
                f"sampler.mesh.{axis}={size} cannot be the size of an engine of rl.engines='ray', whose mesh has "
                f"the axes data, expert and tensor; use {allowed}."
            )
    return {axis: size for axis, size in sizes.items() if size > 1}


def _serve_options(config: RunConfig) -> tuple[str, ...]:
    """Returns flags of launch.serve for the sizes of `sampler`, each of which is that of one engine."""
    sampler = config.sampler
    routes = config.rl.route_shape(config.stage_model("rl")) is not None
    return (
        f"--max_model_len={sampler.max_model_len}",
        f"--slots={sampler.slots}",
        f"--cache_tokens={sampler.cache_tokens or sampler.slots * sampler.max_model_len}",
        *([f"--drafts={sampler.drafts}"] if sampler.drafts else []),
        *(["--return_routed_experts"] if routes else []),
        *(f"--{axis}={size}" for axis, size in _axes(sampler).items()),
    )


def _absolute(publish: str) -> str:
    """Returns the address of the published versions, as processes with another working directory find it."""
    folder = Folder(publish)
    return folder.root if folder.local else folder.name
