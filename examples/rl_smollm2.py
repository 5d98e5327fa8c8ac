"""RL of SmolLM2 on your own tasks; docs/tasks.md says how to make some from a repository.

    python -m launch.rl --config=examples/rl_smollm2.py --config.base=hf:DIR --config.tasks.train=TASKS --workdir=RUN

DIR is the folder of a published model with a context of at least 4096 tokens; `bash launch/smollm2.sh` makes
runs/smollm2-135m-instruct. Each task is used once, so TASKS has at least rl.steps times rl.groups.repository of them.
"""

from ml_collections import ConfigDict

from composer_jax.agent.prompts.system import SYSTEM
from composer_jax.data.chat.tool_prompt import SHORT_TOOL_PROMPT
from composer_jax.schema import sections as cfg

CONTEXT = 4096
"""Tokens of the longest context of an episode, and of a row of training."""


def get_config() -> ConfigDict:
    return cfg.config_dict(
        cfg.RunConfig(
            model=cfg.ModelOfBase(compute_dtype="float32", head_chunk=512),
            stages=("rl",),
            data=cfg.DataConfig(tool_prompt=SHORT_TOOL_PROMPT),
            agent=cfg.AgentConfig(cfg.EpisodeLimits(max_turns=20, max_turn_tokens=512), system_prompt=SYSTEM),
            sampler=cfg.SamplerConfig(max_model_len=CONTEXT, prefill_shapes=((8, 64), (1, 512))),
            rl=cfg.RLConfig(
                steps=10,
                groups=cfg.DISK_FAMILIES | {"repository": 2},
                compaction="none",
                batches=((CONTEXT, 2),),
                optimizer=cfg.OptimizerConfig(peak=1e-5, warmup=1, decay="linear", weight_decay=0.0),
                save_every=1,
            ),
        )
    )
