"""What a configuration of a large run says (configs/kimi_k2_5.py): frozen dataclasses. Unknown fields fail."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from composer_jax.models.config import ModelConfig
from composer_jax.stages.schema import from_mapping
from composer_jax.train.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Devices along every mesh axis (parallel/mesh.py); -1, for one of them, takes what the others leave."""

    replica: int
    data: int
    expert: int
    context: int
    tensor: int


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    rows: int
    """Rows of one batch, over all devices."""
    seq_len: int
    """Tokens of a row."""
    accumulate: int
    """Batches whose gradients are added up before an optimizer step."""


@dataclasses.dataclass(frozen=True)
class PretrainSettings:
    mtp_weight: float
    """Of the multi-token-prediction loss; 0 leaves the module out."""
    bias_rate: float
    """Step of the load-balancing rule."""


@dataclasses.dataclass(frozen=True)
class RLSettings:
    batch: BatchSettings
    ratio_low: float
    ratio_high: float


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """A sampler with devices of its own, or the learner's in another arrangement: a token that is gathered for every
    weight, as in training, would take a second each."""

    mesh: MeshSizes
    param_dtype: str
    """Of the weights that the sampler keeps."""
    slots: int
    """Conversations decoded at once, over all devices."""
    capacity: int
    """Tokens of context that each can hold; the step is estimated with all of it in use."""


@dataclasses.dataclass(frozen=True)
class ScaleSettings:
    model: ModelConfig
    mesh: MeshSizes
    batch: BatchSettings
    optimizer: OptimizerConfig
    pretrain: PretrainSettings
    rl: RLSettings
    decode: DecodeSettings


def scale_settings(config: Mapping[str, Any]) -> ScaleSettings:
    """Builds ScaleSettings from a ConfigDict or nested dict.

    Raises:
      UserError: an unknown or missing field, named with its whole path.
    """
    return from_mapping(ScaleSettings, config, "config")
