"""RunModel: the network of a run, the weights that its stages leave, its tokenizer and its chat format."""

import functools
from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from composer_jax.checkpoint.address import STAGES
from composer_jax.checkpoint.base_model import check_base_model, load_base_weights
from composer_jax.checkpoint.native import model_notes, restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.formats import chat_format_kind
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.models.supported_dtype import supported_network
from composer_jax.parallel.processes import broadcast_from_process0
from composer_jax.rl.config import RLConfig
from composer_jax.schema.run_config import RunConfig
from composer_jax.schema.training_config import TrainingConfig
from composer_jax.stages.run_data import RunData
from composer_jax.storage.workdir import Workdir
from composer_jax.train.learner import Learner
from composer_jax.train.losses import PolicyLossConfig, make_loss
from composer_jax.train.optimizer import make_optimizer
from composer_jax.train.utilisation import Utilisation, total_peak


class RunModel:
    """What is trained: the network as a ModelDef, and its weights stage by stage in DIR/checkpoints."""

    def __init__(
        self, config: RunConfig, path: Path, mesh: Callable[[str | None], Mesh], data: RunData, workdir: Workdir
    ):
        """mesh: returns the mesh of a training stage, or that of the run for None; called when devices are needed.

        data: has the tokenizer. workdir: knows which stages are done.
        """
        self.config, self.path, self.data, self.workdir = config, path, data, workdir
        self._kept_learner: tuple[str, TrainingConfig | RLConfig, Learner] | None = None
        self._mesh = mesh

    @functools.cached_property
    def definition(self) -> ModelDef:
        """The network as this machine computes it outside the training stages."""
        return ModelDef(supported_network(self.config.model))

    @property
    def mesh(self) -> Mesh:
        """The mesh that the weights lie on outside the stages that have one of their own."""
        return self._mesh(None)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The run's tokenizer."""
        return self.data.tokenizer

    @functools.cached_property
    def chat(self) -> ChatFormat:
        """The format of all conversations: the one that data.chat_format names, or the base's own."""
        name = self.config.data.chat_format
        if not name and self.data.base_chat is not None:
            return self.data.base_chat
        return chat_format_kind(name or "compact")(self.tokenizer)

    def initial_weights(self, mesh: Mesh | None = None) -> tuple[Params, Params]:
        """Returns the (params, router_bias) that the run starts from, of its base or random, on a mesh (None: the
        run's)."""
        mesh = self.mesh if mesh is None else mesh
        if self.config.base:
            return load_base_weights(self.config.base, self.definition, mesh, self.config.seed)
        return self.definition.init(self.config.seed, mesh)

    def check_base(self) -> None:
        """Raises a UserError if the base cannot be read, or config.model contradicts it."""
        if self.config.base:
            check_base_model(self.config.base, self.config.model)

    def store(self, stage: str) -> CheckpointStore:
        """Opens the checkpoints of a stage, which keep one step to fall back on if the latest is damaged.

        Their notes hold the network as the config has the stage train it, whatever this machine computes in.
        """
        return CheckpointStore(
            self.workdir.checkpoints(stage),
            keep=2,
            notes=model_notes(ModelDef(self.config.stage_model(stage))),
            before_save=self.workdir.publish,
        )

    def weights_of(self, stage: str, mesh: Mesh | None = None) -> tuple[Params, Params]:
        """Returns the (params, router_bias) that a finished stage left, on a mesh (None: the run's).

        Raises UserError if the stage is not done.
        """
        broadcast_from_process0(lambda: self.workdir.stage_result(stage))
        with self.store(stage) as store:
            return restore_weights(store, self.definition, self.mesh if mesh is None else mesh)

    def stage_before(self, stage: str) -> str | None:
        """Returns the training stage whose weights `stage` starts from; None where it starts from the initial ones."""
        stages = self.config.stages
        if stage in stages:
            earlier = stages[: stages.index(stage)]
        else:  # one that the run skips comes before sft and rl, or before rl alone
            earlier = tuple(name for name in stages if name not in STAGES[STAGES.index(stage) :])
        return earlier[-1] if earlier else None

    def require_stage(self, stage: str) -> None:
        """Raises UserError if the run skips this training stage."""
        if stage not in self.config.stages:
            raise UserError(
                f"config.stages={self.config.stages} leaves out {stage}; begin a run whose config.stages names it."
            )

    def weights_before(self, stage: str) -> tuple[Params, Params]:
        """Returns the (params, router_bias) that a training stage starts from, on the mesh of that stage.

        Raises UserError if the run skips this stage, or the stage before it is not done.
        """
        self.require_stage(stage)
        before, mesh = self.stage_before(stage), self._mesh(stage)
        return self.initial_weights(mesh) if before is None else self.weights_of(before, mesh)

    def utilisation(self, stage: str) -> Utilisation | None:
        """Returns what computes the MFU of a stage's steps; None on devices whose peak is not known."""
        peak = total_peak(device.device_kind for device in self._mesh(stage).devices.flat)
        if peak is None:
            return None
        network, loss = self.config.stage_model(stage), self.config.stage_training(stage).loss
        if isinstance(loss, PolicyLossConfig):
            return Utilisation(network, peak)
        return Utilisation(network, peak, trains_mtp=bool(loss.mtp_weight), trains_trunk=loss.trained == "all")

    def learner(self, stage: str, training: TrainingConfig | RLConfig | None = None) -> Learner:
        """Returns the Learner of a training stage, on its mesh. That of RL freezes the router bias.

        training: another section of the stage's kind, whose optimizer has an equal state; None is that of the run. The
          learner of such a section is kept, with its compiled programs, for updates that follow.
        """
        if training is None:
            return self._new_learner(stage, self.config.stage_training(stage))
        if self._kept_learner is None or self._kept_learner[:2] != (stage, training):
            self._kept_learner = stage, training, self._new_learner(stage, training)
        return self._kept_learner[2]

    def _new_learner(self, stage: str, training: TrainingConfig | RLConfig) -> Learner:
        mesh = self.config.stage_mesh(stage)
        return Learner(
            ModelDef(supported_network(self.config.stage_model(stage))),
            make_optimizer(training.optimizer, training.steps),
            make_loss(training.loss),
            self._mesh(stage),
            reduction=mesh.reduction,
            reduce_dtype=mesh.reduce_dtype,
            router_bias_update_rate=0.0 if isinstance(training, RLConfig) else training.router_bias_update_rate,
        )
