"""RunConfig: the one schema of every file in configs/. It nests the library's own dataclasses.

A field is declared, documented and checked in the dataclass that uses it. Its default is there as well, so a config
file states only what it changes:

    def get_config():
        config = default_config(PRESETS["moonlight_16b_a3b"])
        config.pretrain.steps = 1000
        return config

A run that starts from published weights names them as config.base and may leave the network to them:
`default_config()` has a model section without sizes, which the base fills in.
"""

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ml_collections import ConfigDict

from composer_jax.agent.config import AgentConfig
from composer_jax.checkpoint.address import STAGES
from composer_jax.data.config import DataConfig
from composer_jax.data.sources import SourceConfig
from composer_jax.errors import UserError
from composer_jax.evals.config import EvaluateConfig
from composer_jax.models.config import ModelConfig
from composer_jax.models.presets import PRESETS
from composer_jax.parallel.mesh import MeshConfig
from composer_jax.rl.config import RLConfig
from composer_jax.sampler.config import SamplerConfig
from composer_jax.stages.base import NETWORK_FIELDS, with_base_model
from composer_jax.stages.renamed import RENAMED
from composer_jax.stages.schema import from_mapping, plain_value, to_config_dict
from composer_jax.stages.trace_sources import TraceSourceConfig
from composer_jax.tasks.config import TasksConfig
from composer_jax.train.losses import LanguageLossConfig
from composer_jax.train.optimizer import OptimizerConfig
from composer_jax.train.qk_clip import check_qk_clip


def _documents() -> dict[str, SourceConfig]:
    return {"documents": SourceConfig()}


@dataclass(frozen=True)
class TrainingConfig:
    """What pretraining and SFT have in common."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 8
    """Rows of a batch."""
    seq_len: int = 2048
    """Tokens of a row."""
    loss: LanguageLossConfig = field(default_factory=LanguageLossConfig)
    """Terms of the loss beside next-token cross-entropy."""
    bias_rate: float = 1e-3
    """Step of the router bias that balances experts without a loss term (DeepSeek-V3: 1e-3)."""
    save_every: int = 100
    """Steps between checkpoints."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the stage."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "save_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{self._section}.{name}={getattr(self, name)}; it must be at least 1.")
        if self.seq_len < 2:
            raise UserError(f"{self._section}.seq_len={self.seq_len}; a row needs at least 2 tokens to predict one.")
        if self.bias_rate < 0:
            raise UserError(f"{self._section}.bias_rate={self.bias_rate} is negative; use 0 to leave the bias alone.")

    @property
    def _section(self) -> str:
        return "pretrain" if isinstance(self, PretrainConfig) else "sft"


@dataclass(frozen=True)
class PretrainConfig(TrainingConfig):
    """Continued pretraining on a mixture of sources."""

    sources: Mapping[str, SourceConfig] = field(default_factory=_documents)
    """Name -> source of rows; the kind "documents" is the source code of the data section."""
    evaluate_every: int = 100
    """Steps between held-out evaluations; the first and the last step are always evaluated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluate_every < 1:
            raise UserError(f"pretrain.evaluate_every={self.evaluate_every}; it must be at least 1.")
        if not any(source.weight for source in self.sources.values()):
            raise UserError("pretrain.sources has no source with a weight above 0; name one.")
        last = [
            source.weight if source.final_weight is None else source.final_weight for source in self.sources.values()
        ]
        if not any(last):
            raise UserError("pretrain.sources has no source with a weight above 0 at the end; give one a final_weight.")


@dataclass(frozen=True)
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning on traces of conversations."""

    data: str = ""
    """Paths or URLs of conversations to train on beside `sources`, joined by commas (docs/bases.md), or empty."""
    bad_rows: Literal["error", "drop"] = "error"
    """Rows of `data` that are no conversation or exceed seq_len: "error" refuses the first, "drop" counts them."""
    sources: Mapping[str, TraceSourceConfig] = field(default_factory=dict)
    """Name -> source of traces; the traces of all sources are packed together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bad_rows not in ("error", "drop"):
            raise UserError(f"sft.bad_rows={self.bad_rows!r} is unknown; use error or drop.")


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run depends on. Each stage reads its own section and those that it shares."""

    model: ModelConfig
    """What the network is and how it is computed."""
    base: str = ""
    """Address of the weights that the run starts from: hf:DIR (a folder or gs:// URL of a published model), gguf:FILE,
    or the folder or gs:// URL of a native checkpoint or a run; empty starts from random weights."""
    stages: tuple[str, ...] = STAGES
    """Training stages of the run, of pretrain, sft and rl. A stage that is left out is skipped: the next one starts
    from the weights before it."""
    tensorboard: bool = False
    """Whether the rows of DIR/metrics are written for TensorBoard as well (extra `tensorboard`):
    `tensorboard --logdir=DIR/tensorboard`."""
    seed: int = 0
    """Seed of initialisation, data order, tasks and sampling."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Layout of the devices."""
    data: DataConfig = field(default_factory=DataConfig)
    """Source code for pretraining and the tokenizer."""
    tasks: TasksConfig = field(default_factory=TasksConfig)
    """Task families and tasks from disk."""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    """Continued pretraining."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    """Supervised fine-tuning."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Limits and compaction of episodes."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """The engine that episodes sample from."""
    rl: RLConfig = field(default_factory=RLConfig)
    """Reinforcement learning."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation before and after RL."""

    def __post_init__(self) -> None:
        if list(self.stages) != [name for name in STAGES if name in self.stages]:
            raise UserError(
                f"config.stages={self.stages} is not a selection of {', '.join(STAGES)} in this order; use "
                'for example ("sft", "rl").'
            )
        self.agent.compaction(self.rl.compaction, "rl.compaction")
        for family, name in self.rl.family_compactions.items():
            self.agent.compaction(name, f"rl.family_compactions.{family}")
        self.rl.route_shape(self.model)
        if any(stage.optimizer.qk_clip is not None for stage in (self.pretrain, self.sft, self.rl)):
            check_qk_clip(self.model)
        longest = self.rl.batches[-1][0]
        if self.sampler.capacity > longest:
            raise UserError(
                f"sampler.capacity={self.sampler.capacity} lets episodes grow longer than rl.batches, which hold rows "
                f"of {longest} tokens; lower the one or add a longer batch."
            )
        for name, suite in self.evaluate.suites.items():
            self.agent.compaction(suite.compaction, f"evaluate.suites.{name}.compaction")
            if suite.family not in self.tasks.families:
                known = ", ".join(self.tasks.families) or "none"
                field = f"config.evaluate.suites.{name}.family"
                raise UserError(f"{field}={suite.family!r} is no task family; tasks.families has {known}.")
        self.agent.compaction(self.evaluate.heldout_compaction, "evaluate.heldout_compaction")
        if self.evaluate.effort:
            self.rl.reward.effort.level(self.evaluate.effort)


def default_config(model: ModelConfig | Mapping[str, Any] | None = None) -> ConfigDict:
    """Returns a ConfigDict with every field of RunConfig at its default, for a config file to change.

    Args:
      model: the network; a preset of models/presets.py or the fields of one. None leaves it to config.base.
    """
    if model is not None:
        return to_config_dict(RunConfig(model if isinstance(model, ModelConfig) else ModelConfig(**model)))
    any_network = next(iter(PRESETS.values()))
    config = to_config_dict(RunConfig(any_network))
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    hints = typing.get_type_hints(ModelConfig)
    config.model = ConfigDict(
        {
            name: plain_value(None if name in NETWORK_FIELDS else default, hints[name])
            for name, default in defaults.items()
        }
    )
    return config


def run_config(config: Mapping[str, Any]) -> RunConfig:
    """Builds the RunConfig of a ConfigDict or nested dict, and checks it.

    A model section without sizes is filled in from config.base, which is read for it.

    Raises:
      UserError: an unknown, missing or renamed field, or a value of a wrong type or out of range, named in the
        sentence.
    """
    return from_mapping(RunConfig, with_base_model(config), "config", RENAMED)
