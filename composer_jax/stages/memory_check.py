"""Whether the steps of a training stage fit into the memory of its devices, where that is known."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from absl import logging
from jax.sharding import Mesh

from composer_jax.errors import UserError
from composer_jax.models.cache import abstract_cache
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.chips import GIB
from composer_jax.parallel.mesh import batch_shards
from composer_jax.parallel.sharding import bytes_per_device
from composer_jax.sampler.config import make_limits
from composer_jax.sampler.rollout_weights import rollout_model_def
from composer_jax.stages.run import Run
from composer_jax.train.step_memory import StepMemory, StepMemoryEstimator


@contextmanager
def memory_check(run: Run, stage: str, *, samples: bool = True) -> Iterator[None]:
    """Compares a stage's steps with the memory of its devices, and explains running out of it.

    Nothing is compared on devices that do not tell their memory, such as CPUs. A step that exceeds the memory by the
    estimate alone is tried, after a warning. The sentences name the largest batch that fits by the estimate.

    samples: whether RL has a sampler in this process.

    Raises:
      UserError: before the block, if the run skips the stage or the lower bound exceeds the memory (StepMemory.least);
        from the block, in place of RESOURCE_EXHAUSTED.
    """
    run.model.require_stage(stage)
    mesh = run.stage_mesh(stage)
    limit = memory_limit(mesh)
    if limit is None:
        yield
        return
    steps = _steps(run, stage, limit, samples=samples)
    memory = steps.memory(steps.rows, steps.parts)
    held = f"of the {limit / GIB:.1f} GiB of {mesh.local_devices[0].device_kind}"
    state = f"weights, optimizer state and gradients: {memory.exact / GIB:.1f}"
    about = f"{steps.name} takes about {memory.estimate / GIB:.1f} GiB by the estimate ({state}) {held}"
    if memory.least > limit:
        raise UserError(f"{steps.name} takes at least {memory.least / GIB:.1f} GiB ({state}) {held}; {steps.advice()}")
    if memory.estimate > limit:
        logging.warning("%s and may run out of memory; %s", about, steps.advice())
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        # The host's pinned memory and messages between processes can be exhausted as well.
        first_line = str(error).partition("\n")[0]
        raise UserError(
            f"{stage} ran out of a resource, most often a device's memory ({first_line}): {about}; {steps.advice()}"
            + _uncounted_sampler(run, stage)
        ) from error


def memory_limit(mesh: Mesh) -> float | None:
    """Returns the bytes that JAX may use of a mesh's smallest local device; None where no device tells them.

    On a GPU they are the part of its memory that XLA_PYTHON_CLIENT_MEM_FRACTION gives to JAX.
    """
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    return min((float(of["bytes_limit"]) for of in stats if "bytes_limit" in of), default=None)


@dataclasses.dataclass(frozen=True)
class StepsInMemory:
    """The steps of a stage, with batches of the shape that takes most memory, and the memory of a device."""

    name: str
    """Of the field and the shape, in sentences."""
    rows: int
    """Of a batch, on all devices."""
    shards: int
    """Devices that the rows divide over."""
    parts: int
    """Micro-batches that a batch is split into."""
    limit: float
    """Bytes of a device."""
    memory: Callable[[int, int], StepMemory]
    """(rows of a batch, its micro-batches) -> the memory of a step."""
    with_rows: Callable[[int], str]
    """Rows of a batch -> what to set for them."""
    with_parts: Callable[[int], str] | None
    """Micro-batches -> what to set for them; None where a batch has none."""
    otherwise: str
    """What else takes less memory, for a batch that cannot be smaller or whose size alone does not help."""

    def advice(self) -> str:
        """Returns what to change, as the end of a sentence: a smaller batch or more parts, or else `otherwise`."""
        ways = [self.with_rows(rows)] if (rows := self._largest_rows()) else []
        if self.with_parts is not None and (parts := self._fewest_parts()):
            ways.append(f"{self.with_parts(parts)}, which computes this batch in parts")
        if not ways:
            none = "" if self._fits(self.rows, self.parts) else "by the estimate no smaller batch fits: "
            return f"{none}use {self.otherwise}."
        return f"by the estimate it fits with {', or with '.join(ways)}."

    def _fits(self, rows: int, parts: int) -> bool:
        return self.memory(rows, parts).estimate <= self.limit

    def _largest_rows(self) -> int:
        """Returns the rows of the largest smaller batch that fits; 0 if none does.

        Where this one fits by the estimate, the estimate was too low, and half of this one is the largest.
        """
        step = self.shards * self.parts
        most = self.rows // 2 if self._fits(self.rows, self.parts) else self.rows - 1
        return next((rows for rows in range(most // step * step, 0, -step) if self._fits(rows, self.parts)), 0)

    def _fewest_parts(self) -> int:
        """Returns the fewest parts of this batch, more than it has, that fit; 0 if none do."""
        possible = range(self.parts + 1, self.rows // self.shards + 1)
        return next((n for n in possible if self.rows % (n * self.shards) == 0 and self._fits(self.rows, n)), 0)


def _steps(run: Run, stage: str, limit: float, *, samples: bool = True) -> StepsInMemory:
    return _rl_steps(run, limit, samples) if stage == "rl" else _language_steps(run, stage, limit)


def _language_steps(run: Run, stage: str, limit: float) -> StepsInMemory:
    """Returns the steps of a stage that trains on text."""
    training, section = run.config.training(stage), run.config.section(stage)
    estimator = StepMemoryEstimator(run.model.learner(stage), trains_trunk=training.loss.trained == "all")
    return StepsInMemory(
        f"{section}.batch_size={training.batch_size} of {training.seq_len} tokens a row",
        training.batch_size,
        batch_shards(run.stage_mesh(stage)),
        training.accumulate,
        limit,
        lambda rows, parts: estimator.estimate(rows // parts, training.seq_len, accumulates=parts > 1),
        with_rows=lambda rows: f"--config.{section}.batch_size={rows}",
        with_parts=lambda parts: f"--config.{section}.accumulate={parts}",
        otherwise=_less_memory(run, stage),
    )


def _rl_steps(run: Run, limit: float, samples: bool) -> StepsInMemory:
    """Returns the steps of RL with the shape of rl.batches that takes most memory."""
    shapes = run.config.rl.batches
    beside = _reference_bytes(run) + (_sampler_bytes(run) if samples else 0.0)
    estimator = StepMemoryEstimator(run.model.learner("rl"), beside=beside)

    def memory(rows: int, tokens: int) -> StepMemory:
        return estimator.estimate(rows, tokens, accumulates=True)  # the first step adds an empty batch of every shape

    tokens, rows = max(shapes, key=lambda shape: memory(shape[1], shape[0]).estimate)
    others = [memory(n, length) for length, n in shapes if length != tokens]
    return StepsInMemory(
        f"({tokens}, {rows}) of rl.batches, {rows} rows of {tokens} tokens{', with the sampler' * samples},",
        rows,
        batch_shards(run.stage_mesh("rl")),
        1,
        limit,
        lambda rows, parts: max([memory(rows, tokens), *others], key=lambda of: of.estimate),
        with_rows=lambda rows: f"({tokens}, {rows}) in its place",
        with_parts=None,
        otherwise="fewer rows of all shapes, " * bool(others)
        + "a smaller sampler.cache_tokens, " * samples
        + _less_memory(run, "rl"),
    )


def _uncounted_sampler(run: Run, stage: str) -> str:
    """Returns a further sentence for stages in which suites play between steps, on a sampler beside the state."""
    evaluate = run.config.evaluate
    if stage == "rl" or not evaluate.every or stage not in evaluate.during:
        return ""
    return " The sampler of evaluate.every is not counted; if a suite was playing, use a smaller sampler.cache_tokens."


def _less_memory(run: Run, stage: str) -> str:
    """Returns what takes less memory than the stage's layout, in words."""
    section, network = run.config.section(stage), run.config.stage_model(stage)
    ways = ["more devices along mesh.data", "shorter rows"]
    if not run.config.stage_training(stage).optimizer.offload:
        ways.append(f"--config.{section}.optimizer.offload=True")
    if network.head_chunk is None:
        ways.append("--config.model.head_chunk=2048")
    if not network.remat:
        ways.append("--config.model.remat=True")
    return ", ".join(ways[:-1]) + f" or {ways[-1]}"


def _reference_bytes(run: Run) -> float:
    """Returns the bytes of a device that the weights of RL's reference take."""
    if not run.config.rl.algorithm.kl.coefficient:
        return 0.0
    return bytes_per_device(run.model.definition.abstract_weights(run.stage_mesh("rl")))


def _sampler_bytes(run: Run) -> float:
    """Returns the bytes of a device that the sampler's weights and cache take, unless it has devices of its own."""
    config, mesh = run.config, run.stage_mesh("rl")
    if config.rl.rollout_devices:
        return 0.0
    if config.sampler.mesh is not None:
        mesh = config.sampler.mesh.make_mesh(list(mesh.devices.flat))
    rollout = ModelDef(config.rl.rollout_network(run.model.definition.config))
    definition, shards = rollout_model_def(rollout, config.sampler), batch_shards(mesh)
    limits = make_limits(config.sampler, shards, definition.config)
    cache = abstract_cache(definition.config, mesh, limits.cache_pages, limits.page_size)
    return bytes_per_device((definition.abstract_weights(mesh), cache))
