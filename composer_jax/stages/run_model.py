"""RunModel: the network of a run, the weights that its stages leave, its tokenizer and its chat format."""

import functools
from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from composer_jax.checkpoint.native import model_notes, restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.checkpoint.workdir import Workdir
from composer_jax.data.chat_format import ChatFormat
from composer_jax.data.chat_formats import chat_format_kind
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.parallel.processes import broadcast_from_process0
from composer_jax.stages.config import RunConfig
from composer_jax.stages.run_data import RunData
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLossConfig, PolicyLossConfig, make_loss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer


class RunModel:
    """What is trained: the network as a ModelDef, and its weights stage by stage in DIR/checkpoints."""

    def __init__(self, config: RunConfig, path: Path, mesh: Callable[[], Mesh], data: RunData, workdir: Workdir):
        """mesh: called when devices are needed; data: has the tokenizer; workdir: knows which stages are done."""
        self.config, self.path, self.data, self.workdir = config, path, data, workdir
        self.definition = ModelDef(config.model)
        self._mesh = mesh

    @property
    def mesh(self) -> Mesh:
        """The mesh that the weights lie on."""
        return self._mesh()

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return self.data.tokenizer

    @functools.cached_property
    def chat(self) -> ChatFormat:
        """The format of all conversations, which data.chat_format names."""
        return chat_format_kind(self.config.data.chat_format)(self.tokenizer)

    def init_weights(self) -> tuple[Params, Params]:
        """Returns random (params, router_bias) on the mesh."""
        return self.definition.init(self.config.seed, self.mesh)

    def store(self, stage: str) -> CheckpointStore:
        """Opens the checkpoints of a stage, which keep one step to fall back on if the latest is damaged."""
        return CheckpointStore(self.path / "checkpoints" / stage, keep=2, notes=model_notes(self.definition))

    def weights_of(self, stage: str) -> tuple[Params, Params]:
        """Returns the (params, router_bias) that a finished stage left. Raises UserError if it is not done."""
        broadcast_from_process0(lambda: self.workdir.stage_result(stage))
        with self.store(stage) as store:
            return restore_weights(store, self.definition, self.mesh)

    def learner(
        self,
        optimizer: OptimizerConfig,
        steps: int,
        loss: LanguageLossConfig | PolicyLossConfig,
        bias_rate: float = 0.0,
    ) -> Learner:
        """Returns a Learner on the run's mesh.

        Args:
          steps: length of the learning-rate schedule.
          bias_rate: step of the router bias; 0 freezes it.
        """
        return Learner(
            self.definition,
            make_optimizer(optimizer, steps),
            make_loss(loss),
            self.mesh,
            reduction=self.config.mesh.reduction,
            bias_rate=bias_rate,
        )
