"""Run: the folder of a run, its config, its devices, and the log of its stages."""

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from absl import logging
from jax.sharding import Mesh

from composer_jax.errors import UserError
from composer_jax.models.attention_kinds import attention_form
from composer_jax.observe.metrics import MetricsWriter, NoMetrics
from composer_jax.observe.sinks import find_sinks
from composer_jax.observe.step_trace import StepTrace, require_profiler
from composer_jax.ops.attention_form import FormChoice
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.mesh import MeshConfig, batch_shards
from composer_jax.parallel.platform import configure_cpu, use_compilation_cache
from composer_jax.parallel.processes import broadcast_from_process0, is_first_process, process_count
from composer_jax.schema.config_dict import to_config_dict
from composer_jax.schema.renamed import outdated_fields
from composer_jax.schema.run_config import RunConfig, run_config
from composer_jax.stages.rollout_services import RolloutServices
from composer_jax.stages.run_data import RunData
from composer_jax.stages.run_model import RunModel
from composer_jax.stages.usage import track_usage
from composer_jax.storage.workdir import Workdir, read_run_config

MIN_FREE_BYTES = 500_000_000
"""Free disk space that a run asks for before it starts; the demo writes a tenth of that."""


class Run:
    """One run: `with Run(config, "runs/mine") as run: pipeline(run)`. It locks its folder until the block ends.

    The folder is one of this machine or gs://BUCKET/FOLDER, which the stages then see as a local mirror (run.path).

    Processes (parallel/processes.py) that make the same Run share its folder. Process 0 decides which stages are done
    and writes files; every process writes its shards of checkpoints.

    Attributes:
      config: the RunConfig. workdir, path: the folder.
      model: network, weights, tokenizer and chat format. data: corpus and sources. services: what episodes need.

    Raises:
      UserError: a config with a bad field, a folder of another config, or too little disk space.
    """

    def __init__(self, config: Mapping[str, Any], workdir: Path | str):
        self.config: RunConfig = run_config(config)
        # Every field is kept, with what the base says about the network: neither a default of a later version nor a
        # base that changes goes unnoticed.
        plain = to_config_dict(self.config).to_dict()
        del plain["profile"]  # it changes nothing that the run computes, so a run that goes on may have another
        configure_cpu(self.config.mesh.cpu_devices)
        use_compilation_cache()
        self._sinks = find_sinks(self.config.metric_sinks)  # a missing package is not named after the first hours
        if process_count() > 1:
            self._require_collectives()
        self.workdir = _open_workdir(workdir, plain)
        self.path = self.workdir.path
        self.workdir.require_free(MIN_FREE_BYTES)
        self.data = RunData(self.config, self.path, self.workdir)
        self.model = RunModel(self.config, self.path, self.stage_mesh, self.data, self.workdir)
        self.services = RolloutServices(self.config, self.path, self.model, self.workdir)
        if not self.config.stages or not self.is_done(self.config.stages[0]):
            self.model.check_base()  # before anything large is loaded

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error) -> None:
        self.workdir.__exit__(*error)

    @property
    def mesh(self) -> Mesh:
        """The run's device mesh. Raises UserError if the batches of any stage do not divide over its mesh."""
        return self.stage_mesh(None)

    def stage_mesh(self, stage: str | None) -> Mesh:
        """Returns the device mesh of a training stage; None: that of the run, which all other work uses."""
        config = self.config.mesh if stage is None else self.config.stage_mesh(stage)
        return self._meshes[config]

    @functools.cached_property
    def _meshes(self) -> Mapping[MeshConfig, Mesh]:
        """Every mesh of the run. Raises UserError as `mesh` does, before the first stage starts.

        It says which form of attention the stages have on accelerators.
        """
        configs = (self.config.mesh, *map(self.config.stage_mesh, self.config.stages))
        meshes = {config: config.make_mesh() for config in dict.fromkeys(configs)}
        require_profiler(self.config.profile)
        for stage in self.config.stages:
            self._require_divisible(stage, meshes[self.config.stage_mesh(stage)])
        for line in form_lines(self._attention_forms(meshes)) if is_first_process() else ():
            print(line, file=sys.stderr, flush=True)
        if self.config.sampler.mesh is None and not self.config.rl.rollout_devices and self.config.rl.samples_here:
            _require_rows("sampler.slots", self.config.sampler.slots, meshes[self.config.mesh])
        return meshes

    def is_done(self, stage: str) -> bool:
        """Returns whether a stage is done; process 0 decides."""
        return broadcast_from_process0(lambda: self.workdir.stage_done(stage))

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Runs a stage: yields a dict for its results, which is stored when the block ends without an error.

        What the stage used (seconds, peak_rss_gb) is stored as well, earlier interrupted attempts included. The figures
        are those of process 0.
        """
        result: dict[str, Any] = {}
        used = self.path / "stages" / f"{name}.used"
        with track_usage(used) if is_first_process() else nullcontext(dict) as usage:
            yield result
        broadcast_from_process0(lambda: self.workdir.mark_done(name, {**result, **usage()}))

    def metrics(self, stage: str) -> MetricsWriter | NoMetrics:
        """Returns the writer of metrics/STAGE.jsonl and of the metric sinks; only process 0 writes."""
        if not is_first_process():
            return NoMetrics()
        config = to_config_dict(self.config).to_dict()
        sinks = [sink(self.path, stage, config) for sink in self._sinks]
        return MetricsWriter(self.path / "metrics" / f"{stage}.jsonl", self.workdir.require_held, sinks)

    def trace(self, stage: str) -> StepTrace:
        """Returns the trace of the steps of config.profile."""
        traced, steps = self.config.profile.traced, self.config.stage_steps(stage)
        if traced and traced[-1] > steps:
            logging.warning(
                "%s has %d steps; those of profile.steps=%s get no whole trace.",
                stage,
                steps,
                self.config.profile.steps,
            )
        return StepTrace(self.path / "profile" / stage, traced)

    def _require_collectives(self) -> None:
        for config, mesh in self._meshes.items():
            if config.reduction == "host" and mesh.shape["replica"] > 1:
                raise UserError(
                    'mesh.reduction="host" adds the gradients of replicas in one process, and here are '
                    f"{process_count()}; use --config.mesh.reduction=collective."
                )

    def _batch_shapes(self, stage: str) -> dict[str, tuple[int, int]]:
        """Returns the rows and tokens of the batches of a training stage, by the field that errors name."""
        if stage == "rl":
            return {f"rl.batches[{i}]": (rows, length) for i, (length, rows) in enumerate(self.config.rl.batches)}
        training, section = self.config.training(stage), self.config.section(stage)
        of = f" / accumulate={training.accumulate}" if training.accumulate > 1 else ""
        return {f"{section}.batch_size{of}": (training.micro_batch_size, training.seq_len)}

    def _require_divisible(self, stage: str, mesh: Mesh) -> None:
        for name, (rows, length) in self._batch_shapes(stage).items():
            _require_rows(name, rows, mesh)
            zigzag_order(length, mesh.shape["context"])  # raises UserError for lengths that do not divide

    def _attention_forms(self, meshes: Mapping[MeshConfig, Mesh]) -> list[tuple[str, FormChoice]]:
        """Returns stages with the form of their attention, without those on CPUs, which have one only. Raises UserError
        if a form that is asked for cannot run."""
        forms = []
        for stage in self.config.stages:
            model, mesh = self.config.stage_model(stage), meshes[self.config.stage_mesh(stage)]
            choices = [attention_form(model, mesh, length) for _, length in self._batch_shapes(stage).values()]
            if mesh.devices.flat[0].platform != "cpu":
                forms += [(stage, choice) for choice in choices]
        return forms


def form_lines(forms: Sequence[tuple[str, FormChoice]]) -> list[str]:
    """Returns a line for each form of attention: its stages, and why it is the plain one."""
    stages: dict[FormChoice, dict[str, None]] = {}
    for stage, choice in forms:
        stages.setdefault(choice, {})[stage] = None
    return [
        f"attention of {', '.join(names)}: {form}" + (f", because {reason}" if reason else "")
        for (form, reason), names in stages.items()
    ]


def _require_rows(name: str, rows: int, mesh: Mesh) -> None:
    if rows % (shards := batch_shards(mesh)):
        raise UserError(f"{name} has {rows} rows for {shards} devices; use a multiple of {shards}.")


def _open_workdir(workdir: Path | str, config: dict[str, Any]) -> Workdir:
    """Opens the folder of a run: process 0 claims it, the other processes share it. Raises UserError if the folder
    holds a run of an older config schema, of which the sentence names the fields."""
    if is_first_process():
        _refuse_older_schema(workdir)
    claimed = Workdir(workdir, config) if is_first_process() else None
    holder = broadcast_from_process0(lambda: claimed.holder if claimed else "")
    return claimed or Workdir(workdir, config, holder=holder)


def _refuse_older_schema(workdir: Path | str) -> None:
    stored = read_run_config(workdir)
    if stored is not None and (changes := outdated_fields(stored["config"])):
        raise UserError(
            f"{workdir} holds a run of an older config schema ({changes}); choose another --workdir, or continue it "
            "with the version of composer_jax that began it."
        )
