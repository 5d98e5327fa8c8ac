"""The sections of a run's config that train on text: pretraining, its further phases, and SFT."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_jax.data.sources import SourceConfig
from composer_jax.errors import UserError
from composer_jax.models.config import COMPUTATION_FIELDS, ModelConfig
from composer_jax.parallel.mesh import MeshConfig
from composer_jax.schema.config_dict import from_mapping
from composer_jax.train.losses import LanguageLossConfig
from composer_jax.train.optimizer import OptimizerConfig

ROTARY_FIELDS = ("rope_theta", "yarn", "llama3_rope", "max_context")
STAGE_MODEL_FIELDS = (
    *ROTARY_FIELDS,
    *(name for name in COMPUTATION_FIELDS if name != "param_dtype" and not name.startswith("cache_")),
)
"""Fields of config.model that a stage may change: they leave the weights and their dtype alone."""


def _documents() -> dict[str, SourceConfig]:
    return {"documents": SourceConfig()}


@dataclass(frozen=True)
class TrainingConfig:
    """What pretraining, its phases and SFT have in common."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 8
    """Rows of a batch, which an optimizer step takes."""
    accumulate: int = 1
    """Micro-batches that a batch is split into, one after the other: activations take the memory of
    batch_size / accumulate rows, and gradients are added in float32, 4 bytes a parameter (Megatron's micro-batches,
    PyTorch's gradient accumulation steps)."""
    seq_len: int = 2048
    """Tokens of a row."""
    loss: LanguageLossConfig = field(default_factory=LanguageLossConfig)
    """Terms of the loss beside next-token cross-entropy."""
    router_bias_update_rate: float = 1e-3
    """Step of the router bias that balances experts without a loss term (DeepSeek-V3: 1e-3)."""
    save_every: int = 100
    """Steps between checkpoints."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the stage."""
    mesh: MeshConfig | None = None
    """Layout of the devices in this stage; None: config.mesh. Its cpu_devices is ignored: config.mesh decides."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.model that differ in this stage: rotary frequencies and computation (STAGE_MODEL_FIELDS). A
    stage before the context is extended has {"yarn": None}, one with long rows may have other remat_saves."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "save_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{self._section}.{name}={getattr(self, name)}; it must be at least 1.")
        if self.batch_size % self.accumulate:
            raise UserError(
                f"{self._section}.batch_size={self.batch_size} rows do not divide into accumulate={self.accumulate} "
                f"micro-batches; use a divisor of {self.batch_size}."
            )
        if self.seq_len < 2:
            raise UserError(f"{self._section}.seq_len={self.seq_len}; a row needs at least 2 tokens to predict one.")
        if self.router_bias_update_rate < 0:
            raise UserError(
                f"{self._section}.router_bias_update_rate={self.router_bias_update_rate} is negative; "
                "use 0 to leave the bias alone."
            )
        if unknown := sorted(set(self.model) - set(STAGE_MODEL_FIELDS)):
            raise UserError(
                f"{self._section}.model.{unknown[0]} cannot differ from config.model in one stage; the fields that can "
                f"are {', '.join(STAGE_MODEL_FIELDS)}."
            )

    @property
    def micro_batch_size(self) -> int:
        """Rows whose gradient is computed at once."""
        return self.batch_size // self.accumulate

    def stage_model(self, model: ModelConfig) -> ModelConfig:
        """Returns config.model as this stage trains it. Raises UserError for a value that does not fit."""
        if not self.model:
            return model
        return from_mapping(ModelConfig, dataclasses.asdict(model) | dict(self.model), f"config.{self._section}.model")

    @property
    def _section(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class PretrainConfig(TrainingConfig):
    """Continued pretraining on a mixture of sources."""

    sources: Mapping[str, SourceConfig] = field(default_factory=_documents)
    """Name -> source of rows; the kind "documents" is the source code of the data section."""
    evaluate_every: int = 100
    """Steps between held-out evaluations; the first and the last step are always evaluated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        section = self._section
        if self.evaluate_every < 1:
            raise UserError(f"{section}.evaluate_every={self.evaluate_every}; it must be at least 1.")
        if not any(source.weight for source in self.sources.values()):
            raise UserError(f"{section}.sources has no source with a weight above 0; name one.")
        last = [
            source.weight if source.final_weight is None else source.final_weight for source in self.sources.values()
        ]
        if not any(last):
            raise UserError(
                f"{section}.sources has no source with a weight above 0 at the end; give one a final_weight."
            )

    @property
    def _section(self) -> str:
        return "pretrain"


@dataclass(frozen=True)
class PhaseConfig(PretrainConfig):
    """A phase of continued pretraining after the first one, such as that of long context."""

    @property
    def _section(self) -> str:
        return "phases.NAME"


@dataclass(frozen=True)
class TraceSourceConfig:
    """One source of SFT traces."""

    kind: str
    """A name in TRACE_SOURCES of stages/trace_sources.py ("conversations": files of conversations), or the import path
    of a class (SourceContext, **options) -> ConversationSource."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""


@dataclass(frozen=True)
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning on traces of conversations."""

    data: str = ""
    """Paths or URLs of conversations to train on beside `sources`, joined by commas (docs/bases.md), or empty."""
    bad_rows: Literal["error", "drop"] = "error"
    """Rows of `data` that are not conversations or exceed seq_len: "error" refuses the first, "drop" counts them."""
    sources: Mapping[str, TraceSourceConfig] = field(default_factory=dict)
    """Name -> source of traces; the traces of all sources are packed together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bad_rows not in ("error", "drop"):
            raise UserError(f"sft.bad_rows={self.bad_rows!r} is unknown; use error or drop.")

    @property
    def _section(self) -> str:
        return "sft"
