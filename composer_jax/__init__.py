"""composer_jax trains mixture-of-experts language models to be coding agents.

What a notebook needs is importable from here in one line. A module is loaded when its name is first used.
"""

import importlib

_PUBLIC = {
    "Episode": "composer_jax.agent",
    "Learner": "composer_jax.train.learner",
    "LocalSandboxPool": "composer_jax.sandbox",
    "Model": "composer_jax.stages.model",
    "ModelConfig": "composer_jax.models.config",
    "ModelDef": "composer_jax.models.model_def",
    "Run": "composer_jax.stages.run",
    "Sampler": "composer_jax.sampler.sampler",
    "SandboxPool": "composer_jax.sandbox",
    "Task": "composer_jax.tasks",
    "Tokenizer": "composer_jax.data.tokenizer",
    "Transcript": "composer_jax.agent",
    "UserError": "composer_jax.errors",
    "evaluate": "composer_jax.stages.evaluate",
    "load_hf": "composer_jax.stages.model",
    "load_model": "composer_jax.stages.model",
    "pipeline": "composer_jax.stages.pipeline",
    "pretrain": "composer_jax.stages.pretrain",
    "read_episodes": "composer_jax.observe.episodes",
    "read_metrics": "composer_jax.observe.metrics",
    "report": "composer_jax.stages.report",
    "run_attempt": "composer_jax.stages.play",
    "run_group": "composer_jax.stages.play",
    "save_hf": "composer_jax.checkpoint.huggingface",
    "sft": "composer_jax.stages.sft",
    "train_rl": "composer_jax.stages.train_rl",
}
"""Public name -> the module that has it."""
_RENAMED = {"reinforce": "train_rl", "run_episode": "run_attempt"}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name in _RENAMED:
        raise AttributeError(f"composer_jax.{name} is now composer_jax.{_RENAMED[name]}")
    if name not in _PUBLIC:
        raise AttributeError(f"composer_jax has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
