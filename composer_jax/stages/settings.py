"""The settings of a run: frozen dataclasses made from the ConfigDict of a config file. Unknown fields fail."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    cpu_devices: int
    """XLA devices that the CPU is split into, those of all processes together; without meaning on an accelerator."""
    replica: int
    """Data parallelism with whole copies of the weights; -1 takes the devices that the other axes leave."""
    data: int
    """Data parallelism with sharded dense weights (FSDP)."""
    expert: int
    """Data parallelism with whole experts on each device group."""
    context: int
    """Devices that share a row (parallel/context.py)."""
    tensor: int
    """Devices that share the heads, hidden columns and words of a row."""
    reduction: str
    """How replicas add their gradients: "collective", or "host" (train/learner.py says when)."""


@dataclasses.dataclass(frozen=True)
class DataSettings:
    source: str
    """Folder of source code; empty means the standard library of the running Python."""
    extensions: tuple[str, ...]
    max_bytes: int
    """Bytes of training source that are read."""
    max_heldout_bytes: int
    tokenizer_bytes: int
    """Bytes of training source that the tokenizer is trained on."""
    tokenizer_tasks: int
    """Training tasks whose text the tokenizer sees as well: tool calls are JSON, which source code is not."""


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """Tasks from disk beside the generated ones: what `launch.tasks generate` wrote, Harbor directories, or rows of
    SWE-bench and SWE-smith. `launch.tasks show PATH` says whether a path can be read."""

    train: str
    """Path of tasks to train on, or empty; rl.groups says how many of each family. Each is used once."""
    heldout: str
    """Path of tasks to evaluate on, or empty; all of them are attempted, each family in a suite of its own."""
    repos: str
    """Folder of git repositories, for rows."""
    packages: str
    """Folder of installed packages, for rows and for Harbor directories of others."""


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    peak: float
    warmup: int
    decay: str
    final: float
    b2: float
    weight_decay: float
    clip: float


@dataclasses.dataclass(frozen=True)
class PretrainSettings:
    steps: int
    batch_size: int
    seq_len: int
    copy_fraction: float
    """Share of the rows that teach copying (data/copying.py)."""
    exercise_fraction: float
    """Share of the rows that hold repair exercises (agent/exercises.py)."""
    exercises: int
    """How many different ones there are."""
    mtp_weight: float
    balance_weight: float
    """Of the sequence-wise balance of experts (train/losses.py)."""
    bias_rate: float
    evaluate_every: int
    save_every: int
    optimizer: OptimizerSettings


@dataclasses.dataclass(frozen=True)
class SFTSettings:
    traces: Mapping[str, int]
    """Expert traces of each sort: bugfix, recall_short, recall_long, recall_uncompacted."""
    rates: Mapping[str, Mapping[str, float]]
    """Overrides of the experts' rates (agent/expert.py), by family."""
    exercises: int
    """Repair exercises (agent/exercises.py) among the traces."""
    steps: int
    batch_size: int
    seq_len: int
    bias_rate: float
    save_every: int
    optimizer: OptimizerSettings


@dataclasses.dataclass(frozen=True)
class AgentSettings:
    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int
    trigger: int
    """Tokens of context at which a summary is asked for in evaluations and expert traces."""
    max_segments: int
    max_summary_tokens: int
    max_report_tokens: int
    """Longest answer to the long request."""
    concurrency: int
    """Sandboxes in use at once; and so many containers, for tasks that need an image."""


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    slots: int
    capacity: int
    decode_steps: int
    prefill_shapes: tuple[tuple[int, int], ...]
    decode_rows: tuple[int, ...]
    windows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    weight: float
    summary_token: float
    turn: float
    k: float
    q: float
    zeroed: tuple[str, ...]
    """Flags of tasks/grading/hack_monitor.py that make an episode worth 0; () only records them."""


@dataclasses.dataclass(frozen=True)
class RLSettings:
    steps: int
    groups: Mapping[str, int]
    """Task family -> groups of it in every step. Families: those of generators, and those that tasks.train holds."""
    group_size: int
    trigger: tuple[int, int]
    uncompacted_share: float
    tokens_per_episode: float
    batches: tuple[tuple[int, int], ...]
    """(row length, rows) of training batches, by ascending length; a row goes into the first that holds it."""
    ratio_low: float
    ratio_high: float
    save_every: int
    record_every: int
    """Steps between those whose first group of each family is kept for the report."""
    reward: RewardSettings
    optimizer: OptimizerSettings


@dataclasses.dataclass(frozen=True)
class EvaluateSettings:
    tasks: int
    """Held-out tasks of each suite."""
    attempts: int
    other_attempts: int
    """Attempts at each task in the suites other than bug fixing, which need no pass@k."""
    recorded_tasks: int
    """Tasks of each suite whose first two attempts go into the report."""


@dataclasses.dataclass(frozen=True)
class Settings:
    seed: int
    model: ModelConfig
    mesh: MeshSettings
    data: DataSettings
    tasks: TaskSettings
    pretrain: PretrainSettings
    sft: SFTSettings
    agent: AgentSettings
    sampler: SamplerSettings
    rl: RLSettings
    evaluate: EvaluateSettings


def settings_from(config: Mapping[str, Any]) -> Settings:
    """Builds Settings from a ConfigDict or nested dict.

    Raises:
      UserError: an unknown or missing field, named with its whole path.
    """
    return build(Settings, config, "config")


def build(cls: type, values: Mapping[str, Any], path: str):
    """A dataclass from a section of fields, its own sections included; `path` is what errors call it."""
    if not isinstance(values, Mapping) and not hasattr(values, "items"):
        raise UserError(f"{path} must be a section of fields, not {values!r}.")
    hints = typing.get_type_hints(cls)
    values = dict(values.items())
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise UserError(f"Unknown field {path}.{unknown[0]}; the fields there are {', '.join(hints)}.")
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in values and f.default is dataclasses.MISSING]
    if missing:
        raise UserError(f"{path}.{missing[0]} is missing.")
    return cls(**{name: _value(hints[name], value, f"{path}.{name}") for name, value in values.items()})


def _value(hint: Any, value: Any, path: str) -> Any:
    if isinstance(hint, types.UnionType) and hasattr(value, "items"):  # a section or None
        hint = next((h for h in typing.get_args(hint) if dataclasses.is_dataclass(h)), hint)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, path)
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{path}={value!r} must be a list of values.")
        inner = typing.get_args(hint)
        inner = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(value) != len(inner):
            raise UserError(f"{path}={value!r} must have {len(inner)} values.")
        return tuple(_value(h, v, f"{path}[{i}]") for i, (h, v) in enumerate(zip(inner, value, strict=True)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not hasattr(value, "items"):
            raise UserError(f"{path} must be a section of fields, not {value!r}.")
        return {k: _value(typing.get_args(hint)[1], v, f"{path}.{k}") for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = hint if isinstance(hint, type | types.UnionType) else None
    if plain is not None and (not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool)):
        raise UserError(f"{path}={value!r} must be of type {getattr(plain, '__name__', plain)}.")
    return value
