"""What a config file is written with, in one place: the dataclass of every section of RunConfig, and config_dict.

    from composer_jax.schema import sections as cfg

Each is declared in the module that reads it (schema/run_config.py).
"""

from composer_jax.agent.config import AgentConfig as AgentConfig
from composer_jax.agent.effort import EffortConfig as EffortConfig
from composer_jax.agent.effort import EffortLevel as EffortLevel
from composer_jax.agent.episode_context import EpisodeLimits as EpisodeLimits
from composer_jax.agent.summary import Compaction as Compaction
from composer_jax.checkpoint.base_model import ModelOfBase as ModelOfBase
from composer_jax.data.config import DataConfig as DataConfig
from composer_jax.data.config import TokenizerTextConfig as TokenizerTextConfig
from composer_jax.data.sources import SourceConfig as SourceConfig
from composer_jax.evals.config import EvaluateConfig as EvaluateConfig
from composer_jax.evals.config import SuiteConfig as SuiteConfig
from composer_jax.models.config import ModelConfig as ModelConfig
from composer_jax.models.presets import PRESETS as PRESETS
from composer_jax.models.rope import Llama3Rope as Llama3Rope
from composer_jax.models.rope import Yarn as Yarn
from composer_jax.observe.step_trace import ProfileConfig as ProfileConfig
from composer_jax.parallel.mesh import MeshConfig as MeshConfig
from composer_jax.realtime.batches.rules import BatchRules as BatchRules
from composer_jax.realtime.config import TrafficConfig as TrafficConfig
from composer_jax.realtime.labels.reward import RewardWeights as RewardWeights
from composer_jax.realtime.release.canary import CanaryRules as CanaryRules
from composer_jax.realtime.release.gate import GateRules as GateRules
from composer_jax.rl.config import DISK_FAMILIES as DISK_FAMILIES
from composer_jax.rl.config import AlgorithmConfig as AlgorithmConfig
from composer_jax.rl.config import NormaliserConfig as NormaliserConfig
from composer_jax.rl.config import RLConfig as RLConfig
from composer_jax.rl.curriculum import CurriculumConfig as CurriculumConfig
from composer_jax.rl.engines.config import FleetConfig as FleetConfig
from composer_jax.rl.feedback import FeedbackConfig as FeedbackConfig
from composer_jax.rl.reference import ReferenceKLConfig as ReferenceKLConfig
from composer_jax.rl.replay import ReplayConfig as ReplayConfig
from composer_jax.rl.rewards import RewardConfig as RewardConfig
from composer_jax.sampler.config import SamplerConfig as SamplerConfig
from composer_jax.sandbox.config import SandboxConfig as SandboxConfig
from composer_jax.schema.run_config import RunConfig as RunConfig
from composer_jax.schema.run_config import config_dict as config_dict
from composer_jax.schema.training_config import PhaseConfig as PhaseConfig
from composer_jax.schema.training_config import PretrainConfig as PretrainConfig
from composer_jax.schema.training_config import SFTConfig as SFTConfig
from composer_jax.schema.training_config import TraceSourceConfig as TraceSourceConfig
from composer_jax.tasks.config import TasksConfig as TasksConfig
from composer_jax.train.losses import LanguageLossConfig as LanguageLossConfig
from composer_jax.train.losses import PolicyLossConfig as PolicyLossConfig
from composer_jax.train.optimizer import OptimizerConfig as OptimizerConfig
