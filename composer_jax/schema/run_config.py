"""RunConfig: the one schema of every file in configs/. It nests the library's own dataclasses.

A field is declared, documented and checked in the dataclass that uses it. Its default is there as well, so a config
file states only what it changes, in constructors whose arguments a type checker knows:

    def get_config():
        return config_dict(RunConfig(PRESETS["moonlight_16b_a3b"], rl=RLConfig(steps=1000)))

A run that starts from published weights names them as config.base and may leave the network to them: its model section
is ModelOfBase(), which the base fills in.
"""

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from composer_jax.agent.config import AgentConfig
from composer_jax.checkpoint.address import STAGES
from composer_jax.checkpoint.base_model import ModelOfBase, with_base_model
from composer_jax.data.config import DataConfig
from composer_jax.errors import UserError
from composer_jax.evals.config import EvaluateConfig
from composer_jax.models.attention_kinds import attention_kind
from composer_jax.models.config import ModelConfig
from composer_jax.observe.step_trace import ProfileConfig
from composer_jax.parallel.mesh import MeshConfig
from composer_jax.realtime.config import TrafficConfig
from composer_jax.rl.config import RLConfig
from composer_jax.rl.weight_check import gap_bound
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sandbox.config import SandboxConfig
from composer_jax.schema.config_dict import from_mapping, plain_value, to_config_dict
from composer_jax.schema.renamed import outdated_fields
from composer_jax.schema.training_config import PhaseConfig, PretrainConfig, SFTConfig, TrainingConfig
from composer_jax.tasks.config import TasksConfig
from composer_jax.train.qk_clip import check_qk_clip


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run depends on. Each stage reads its own section and those that it shares."""

    model: ModelConfig
    """What the network is and how it is computed."""
    base: str = ""
    """Address of the weights that the run starts from: hf:DIR (a folder or gs:// URL of a published model), gguf:FILE,
    or the folder or gs:// URL of a native checkpoint or a run; empty starts from random weights."""
    stages: tuple[str, ...] = STAGES
    """Training stages of the run, of pretrain, the names of `phases`, sft and rl. A stage that is left out is skipped:
    the next one starts from the weights before it."""
    metric_sinks: tuple[str, ...] = ()
    """Where the rows of DIR/metrics go as well: "tensorboard" (DIR/tensorboard), "wandb" (Weights & Biases), each with
    the extra of its name, or the import path of a sink of yours (observe/sinks.py)."""
    seed: int = 0
    """Seed of initialisation, data order, tasks and sampling."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Layout of the devices."""
    data: DataConfig = field(default_factory=DataConfig)
    """Source code for pretraining and the tokenizer."""
    tasks: TasksConfig = field(default_factory=TasksConfig)
    """Task families and tasks from disk."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """What the sandboxes of tasks may reach."""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    """Continued pretraining."""
    phases: Mapping[str, PhaseConfig] = field(default_factory=dict)
    """Name -> a further phase of continued pretraining between `pretrain` and `sft`, such as long_context. A phase runs
    where config.stages names it."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    """Supervised fine-tuning."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Limits and compaction of episodes."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """The engine that episodes sample from."""
    rl: RLConfig = field(default_factory=RLConfig)
    """Reinforcement learning."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation before and after RL, and while training."""
    traffic: TrafficConfig = field(default_factory=TrafficConfig)
    """Learning from production traffic after RL (launch.traffic)."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Steps of which JAX's profiler writes a trace."""

    def __post_init__(self) -> None:
        self._check_stages()
        self.agent.compaction(self.rl.compaction, "rl.compaction")
        for family, name in self.rl.family_compactions.items():
            self.agent.compaction(name, f"rl.family_compactions.{family}")
        if not isinstance(self.model, ModelOfBase):
            self._check_model()
        longest = self.rl.batches[-1][0]
        if self.sampler.max_model_len > longest:
            raise UserError(
                f"sampler.max_model_len={self.sampler.max_model_len} lets episodes grow longer than rl.batches, "
                f"which hold rows of {longest} tokens; lower the one or add a longer batch."
            )
        for name, suite in self.evaluate.suites.items():
            self.agent.compaction(suite.compaction, f"evaluate.suites.{name}.compaction")
            if suite.family not in self.tasks.families:
                known = ", ".join(self.tasks.families) or "none"
                field = f"config.evaluate.suites.{name}.family"
                raise UserError(f"{field}={suite.family!r} is not a task family; tasks.families has {known}.")
        self.agent.compaction(self.evaluate.heldout_compaction, "evaluate.heldout_compaction")
        if on_disk := [name for name in self.evaluate.every if name not in self.evaluate.suites]:
            if not self.tasks.heldout:
                raise UserError(
                    f"evaluate.every names the suite {on_disk[0]!r}, and tasks.heldout is empty; evaluate.suites has "
                    f"{', '.join(self.evaluate.suites) or 'none'}."
                )
        self._check_profile()
        if self.replays_sft and not (self.sft.data or self.sft.sources):
            raise UserError(
                f"rl.replay.fraction={self.rl.replay.fraction} trains conversations of SFT beside the episodes of RL, "
                "and config.sft.data and config.sft.sources are empty; name a file of conversations as "
                "--config.sft.data=FILE, or use 0."
            )
        if self.evaluate.effort:
            self.rl.reward.effort.level(self.evaluate.effort)

    @property
    def evaluate_at_once(self) -> int | None:
        """Episodes of the suites of evaluate.every that play at once during RL; None: as many as can."""
        if self.rl.deterministic:
            return None
        return max(1, int(self.evaluate.slots_fraction * self.sampler.slots))

    @property
    def replays_sft(self) -> bool:
        """Whether RL trains conversations of SFT (rl.replay)."""
        return "rl" in self.stages and self.rl.replay.fraction > 0

    @property
    def pretraining(self) -> tuple[str, ...]:
        """The stages of the run that are continued pretraining: pretrain and phases."""
        return tuple(name for name in self.stages if name == "pretrain" or name in self.phases)

    def training(self, stage: str) -> TrainingConfig:
        """Returns the section of a stage that trains on text: pretrain, a phase, or sft."""
        return {**self.phases, "pretrain": self.pretrain, "sft": self.sft}[stage]

    def stage_training(self, stage: str) -> TrainingConfig | RLConfig:
        """Returns the section of a training stage."""
        return self.rl if stage == "rl" else self.training(stage)

    def section(self, stage: str) -> str:
        """Returns the path of a stage's section: "pretrain", "phases.NAME", "sft" or "rl"."""
        return f"phases.{stage}" if stage in self.phases else stage

    def stage_model(self, stage: str) -> ModelConfig:
        """Returns the network as a training stage computes it."""
        return self.model if stage == "rl" else self.training(stage).stage_model(self.model)

    def stage_mesh(self, stage: str) -> MeshConfig:
        """Returns the layout of the devices in a training stage."""
        return self.mesh if stage == "rl" else self.training(stage).mesh or self.mesh

    def _check_model(self) -> None:
        self.rl.route_shape(self.model)
        if self.rl.weight_gap_bound is not None:
            gap_bound(self.rl, self.model, self.sampler)
        if any(
            stage.optimizer.qk_clip is not None for stage in (self.pretrain, *self.phases.values(), self.sft, self.rl)
        ):
            check_qk_clip(self.model)

    def stage_steps(self, stage: str) -> int:
        """Returns the steps of a training stage."""
        return self.stage_training(stage).steps

    def _check_profile(self) -> None:
        steps = {stage: self.stage_steps(stage) for stage in self.stages}
        if steps and self.profile.steps and max(steps.values()) < self.profile.traced[-1]:
            lengths = ", ".join(f"{stage} {count}" for stage, count in steps.items())
            raise UserError(
                f"config.profile.steps={self.profile.steps} ends after the last step of every stage ({lengths}); "
                "choose earlier steps."
            )

    def _check_stages(self) -> None:
        for name in self.phases:
            if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in STAGES or name.startswith("evaluate"):
                raise UserError(
                    f"config.phases has the name {name!r}; use lower-case letters, digits and _, and neither the name "
                    "of a stage nor one that begins with evaluate."
                )
        rank = {"pretrain": 0, **dict.fromkeys(self.phases, 1), "sft": 2, "rl": 3}
        ranks = [rank.get(name, -1) for name in self.stages]
        if -1 in ranks or ranks != sorted(ranks) or len(set(self.stages)) < len(self.stages):
            known = ", ".join(("pretrain", *self.phases, "sft", "rl"))
            raise UserError(
                f"config.stages={self.stages} is not a selection of {known} in this order; use for example "
                '("sft", "rl").'
            )

    def check_lengths(self) -> None:
        """Raises a UserError for a stage whose rows are longer than the context that the network has in it."""
        for name in self.stages:
            if name == "rl":
                continue
            length, longest = self.training(name).seq_len, self.stage_model(name).max_context
            if length > longest:
                raise UserError(
                    f"{self.section(name)}.seq_len={length} is longer than the context of {longest} tokens that the "
                    "network has in this stage; use shorter rows, or extend model.max_context, with model.yarn."
                )


def config_dict(run: RunConfig) -> ConfigDict:
    """Returns what get_config() of a config file returns: every field of the run, for the command line to change.

    A field that ModelOfBase leaves to config.base has no value.
    """
    config: Any = to_config_dict(run)  # Any: a ConfigDict types its sections as plain values
    if isinstance(run.model, ModelOfBase):
        for name, hint in typing.get_type_hints(ModelConfig).items():
            if run.model.leaves_to_base(name):
                config.model[name] = plain_value(None, hint)
    return config


def run_config(config: Mapping[str, Any]) -> RunConfig:
    """Builds the RunConfig of a ConfigDict or nested dict, and checks it.

    A model section without sizes is filled in from config.base, which is read for it. Raises UserError for an unknown,
    missing or renamed field, or a value of a wrong type or out of range, named in the sentence.
    """
    if changes := outdated_fields(config):
        raise UserError(f"config has fields of an older schema: {changes}.")
    checked = from_mapping(RunConfig, with_base_model(config), "config")
    checked.check_lengths()
    for network in (checked.model, *map(checked.stage_model, checked.stages)):
        attention_kind(network)  # refuses fields that the kind does not take before the first stage starts
    return checked
