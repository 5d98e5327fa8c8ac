"""RolloutServices: what episodes need: the sampler, tasks, and sandboxes with the event loop they live in."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.sharding import Mesh

from composer_jax.agent.episode_context import EpisodeContext, EpisodeSettings
from composer_jax.atomic_write import write_atomically
from composer_jax.data.chat.load_chat_format import TOKENIZER_FILES
from composer_jax.data.chat.tool_prompt import TOOL_PROMPT
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop
from composer_jax.models.model_def import Params
from composer_jax.parallel.dispatch import find_dispatch
from composer_jax.parallel.mesh import MeshConfig
from composer_jax.parallel.processes import process_count
from composer_jax.rl.workers.worker_setup import WorkerSetup
from composer_jax.sampler.sampler import Sampler
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.schema.run_config import RunConfig
from composer_jax.stages.engine_placement import engine_share
from composer_jax.stages.rollout_workers import RolloutWorkers, RolloutWorkersOptions
from composer_jax.stages.run_model import RunModel
from composer_jax.storage.workdir import Workdir
from composer_jax.tasks.images import ImagePools
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.source import TaskSource


class RolloutServices:
    """The services of RL and evaluation, each made on first use."""

    def __init__(self, config: RunConfig, path: Path, model: RunModel, workdir: Workdir):
        self.config, self.path, self.model, self.workdir = config, path, model, workdir
        self.worker_options: RolloutWorkersOptions | None = None
        """Who plays the episodes instead of the processes of the run; launch.rl sets it."""
        self.engine_token = ""
        """What engines must know (rl.engines); launch.rl sets it."""
        self.only_fitting = config.rl.deterministic
        """Whether no bit of an episode may depend on how long tools take (Sampler); replays of a rollout set it."""
        self._reads_train_tasks = False
        self._is_compiled = False

    def prepare_updates(self) -> None:
        """Makes them the services of updates from traffic, which play tasks of RL when RL is done, and bit for bit.

        No session may be open.
        """
        if self._reads_train_tasks and self.only_fitting:
            return
        self._reads_train_tasks = self.only_fitting = True
        for name in ("sampler", "tasks"):
            vars(self).pop(name, None)
        self._is_compiled = False

    @functools.cached_property
    def sampler(self) -> Sampler:
        """The engine, without weights. Raises UserError for a dispatch that may drop tokens.

        Where this process plays the episodes, no more sessions open than it has sandboxes, or slots if those are more;
        workers open no more than they have room for.
        """
        dispatch = self.config.model.dispatch
        if find_dispatch(dispatch).may_drop:
            raise UserError(
                f"model.dispatch={dispatch!r} may drop tokens when an expert is full, and the sampler does not count "
                "them; use model.dispatch=ring for RL and evaluation, or a Dispatch of yours with may_drop=False."
            )
        model, definition = self.model, self.model.definition
        if "rl" in self.config.stages:
            definition = dataclasses.replace(definition, config=self.config.rl.rollout_network(definition.config))
        plays_here = self.worker_options is None and process_count() == 1
        sampler = self.config.sampler
        return Sampler(
            definition,
            self._rollout_mesh(),
            sampler,
            end_tokens=model.chat.end_tokens,
            most_sessions=max(self.config.agent.concurrency, sampler.slots) if plays_here else None,
            only_fitting=self.only_fitting,
        )

    def _rollout_mesh(self) -> Mesh:
        """Returns the mesh of the run, or one on the devices that the sampler has to itself.

        Raises UserError if the mesh of the run needs these devices, or there are several processes.
        """
        mesh, count = self.model.mesh, self.config.rl.rollout_devices
        if not count:
            return mesh
        if process_count() > 1:
            raise UserError(
                f"rl.rollout_devices={count} needs a single process, and this run has {process_count()}; use "
                "rl.rollout_devices=0, which shares the devices of the learner."
            )
        devices = jax.devices()
        if count + mesh.size > len(devices):
            raise UserError(
                f"rl.rollout_devices={count} and a mesh of {mesh.size} devices for the learner need more than the "
                f"{len(devices)} devices; use smaller sizes of --config.mesh, none of them -1, or fewer for rollout."
            )
        return (self.config.sampler.mesh or MeshConfig()).make_mesh(devices[-count:])

    def sampler_with(self, params: Params, router_bias: Params, version: int) -> Sampler:
        """Returns the run's sampler with these weights; the first call compiles all of its programs."""
        self.sampler.update(params, router_bias, version)
        if not self._is_compiled:
            self.sampler.warm_up()
            self._is_compiled = True
        return self.sampler

    @functools.cached_property
    def tasks(self) -> TaskSource:
        """The run's tasks. Raises UserError if RL would run out of them; tasks.train is not read once RL is done."""
        is_trained = self.workdir.stage_done("rl")
        read_train = self._reads_train_tasks or not is_trained
        source = TaskSource(
            self.config.seed, self.config.tasks, read_train=read_train, network=self.config.sandbox.network
        )
        if not is_trained:
            rl = self.config.rl
            source.require(rl.groups, rl.steps, rl.curriculum.ladders)
        return source

    def check_task_manifest(self, step: int) -> None:
        """Writes the list of tasks from disk that RL uses at step 0; at a later step compares with that list.

        RL knows how many tasks it has used, not which. Raises UserError if the list is another than when RL began.
        """
        drawn, manifest = self.tasks.drawn(self.config.rl.families), self.path / "data" / "tasks.json"
        if step == 0:
            manifest.parent.mkdir(exist_ok=True)
            write_atomically(manifest, (json.dumps(drawn, indent=1) + "\n").encode())
        elif manifest.exists() and json.loads(manifest.read_bytes()) != drawn:
            raise UserError(
                f"{self.config.tasks.train} holds other tasks than when RL in {self.path} began, which {manifest} "
                "lists; put them back, or begin another run in a new workdir."
            )

    @contextmanager
    def episode_context(
        self, *, temperature: float = 1.0, return_routing: bool = False
    ) -> Iterator[tuple[EpisodeContext, EventLoop]]:
        """Yields what episodes need beside a policy, and the event loop that their sandboxes live in.

        temperature, return_routing: as in EpisodeSettings.
        """
        agent = self.config.agent
        with EventLoop() as loop:
            pool = LocalSandboxPool(self.tasks.limits, size=agent.concurrency, network=self._has_network)
            images = ImagePools(agent.concurrency)
            try:
                settings = EpisodeSettings(
                    agent.limits,
                    system_prompt=agent.system_prompt,
                    effort=self.config.rl.reward.effort,
                    temperature=temperature,
                    episode_seconds=agent.episode_seconds,
                    return_routing=return_routing,
                )
                yield EpisodeContext(self.model.chat, pool, settings, ResultCache(), images), loop
            finally:
                loop.run(pool.close())
                loop.run(images.close())

    def rollout_workers(self, context: EpisodeContext) -> RolloutWorkers:
        """Returns what plays episodes: the processes of the run, unless `worker_options` has other workers.

        context: that of `episode_context`.
        """
        options = self.worker_options
        if options is not None:
            options = dataclasses.replace(options, engine_share=engine_share(self.config))
        elif process_count() > 1:
            options = RolloutWorkersOptions.of_processes(self.config.agent.concurrency)
        return RolloutWorkers(options, functools.partial(self._worker_setup, context), context)

    def _worker_setup(self, context: EpisodeContext) -> WorkerSetup:
        _ = self.model.chat  # writes the files
        config, folder = self.config, self.path / ("base" if self.config.base else "data")
        paths = [folder / name for name in TOKENIZER_FILES]
        return WorkerSetup(
            {path.name: path.read_text(encoding="utf-8") for path in paths if path.exists()},
            config.data.chat_format or ("" if config.base else "compact"),
            config.data.tool_prompt or TOOL_PROMPT,
            context.settings,
            self.tasks.limits,
            self._has_network,
        )

    @property
    def _has_network(self) -> bool:
        """Whether sandboxes of tasks that need the network get it."""
        return self.config.sandbox.network == "host"

    def check(self) -> None:
        """Raises UserError for what RL would meet after hours: missing tasks, or a machine that refuses sandboxes."""
        limits = self.tasks.limits

        async def run_hello() -> str:
            async with (
                LocalSandboxPool(limits, size=1, network=self._has_network) as pool,
                await pool.acquire({"hello.py": "print('ready')"}) as sandbox,
            ):
                return (await sandbox.run(["python", "hello.py"])).stdout

        with EventLoop() as loop:
            stdout = loop.run(run_hello())
        if stdout != "ready\n":
            raise UserError(
                f"The sandbox runs but a program in it printed {stdout!r} instead of 'ready'; see docs/sandbox.md."
            )
