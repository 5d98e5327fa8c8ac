"""composer_jax: turn an open mixture-of-experts model into a coding agent, from one CPU to a TPU pod.

What a notebook needs is importable from here in one line; nothing is loaded before it is used.
"""

import importlib

_PUBLIC = {
    "ModelDef": "composer_jax.models.model_def",
    "ModelConfig": "composer_jax.models.config",
    "Run": "composer_jax.stages.run",
    "Tokenizer": "composer_jax.data.tokenizer",
    "UserError": "composer_jax.errors",
    "evaluate": "composer_jax.stages.evaluate",
    "load_hf": "composer_jax.checkpoint.huggingface",
    "pipeline": "composer_jax.stages.pipeline",
    "pretrain": "composer_jax.stages.pretrain",
    "read_episodes": "composer_jax.observe.episodes",
    "read_metrics": "composer_jax.observe.metrics",
    "reinforce": "composer_jax.stages.reinforce",
    "report": "composer_jax.stages.report",
    "save_hf": "composer_jax.checkpoint.huggingface",
    "sft": "composer_jax.stages.sft",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"composer_jax has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
