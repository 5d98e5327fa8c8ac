"""SmolLM2-135M-Instruct, a real pretrained model, on one CPU: it learns to repair bugs with the tools of repositories.

    bash launch/smollm2.sh                                                      # fetches the model, then every stage
    python -m launch.pipeline --config=smollm2_135m --config.base=hf:DIR --workdir=runs/smollm2

`smollm2_135m:long` is the same with as many steps as fit into eight hours on two cores; `smollm2_135m:smoke` takes one
step of each stage. `short_rft` and `long_rft` are controls of those runs, whose base is the checkpoint after SFT: SFT
on the solved ones of its own episodes (sft.data), once. Numbers are ours (not published).
"""

from typing import Any

from ml_collections import ConfigDict

from composer_jax.agent.prompts.system import SYSTEM
from composer_jax.data.chat.tool_prompt import SHORT_TOOL_PROMPT
from composer_jax.errors import UserError
from composer_jax.schema.run_config import default_config

ROW = 1152
"""Tokens of the longest episode, of the sampler's contexts and of RL's training rows."""
TWO_TRACES = 1792
"""Tokens of a row of SFT, which holds two traces of the expert: they have 865 tokens on average."""
SIZES = {
    # SFT steps, RL steps, held-out tasks, attempts at each
    "short": (20, 6, 24, 2),
    "long": (20, 60, 64, 4),
    "smoke": (1, 1, 1, 2),
}
GROUPS, GROUP_SIZE = 2, 8
RFT = "_rft"
"""Ends the size of a run's control by rejection-sampling fine-tuning."""


def get_config(size: str = "short") -> ConfigDict:
    """size: one of SIZES, or one with RFT behind it."""
    is_control, of = size.endswith(RFT), size.removesuffix(RFT)
    if of not in SIZES:
        raise UserError(f"configs/smollm2_135m.py has no size {size!r}; use {', '.join(SIZES)}, or one with {RFT}.")
    sft_steps, rl_steps, tasks, attempts = SIZES[of]
    batch = 4
    if is_control:  # a row holds two traces; three quarters of the episodes that RL samples are solved
        sft_steps = max(1, GROUPS * GROUP_SIZE * rl_steps * 3 // 4 // 2 // batch)
    config: Any = default_config()  # Any: a ConfigDict types its sections as plain values
    config.stages = ("sft",) if is_control else ("sft", "rl")
    config.mesh.update({"cpu_devices": 1, "replica": 1})
    config.model.update({"compute_dtype": "float32", "head_chunk": 512, "remat_saves": ("attention", "feed_forward")})
    config.data.tool_prompt = SHORT_TOOL_PROMPT
    config.tasks.families = {"bugs": "composer_jax.demo.repository_bugs:RepositoryBugs"}
    config.agent.system_prompt = SYSTEM
    config.agent.limits.update({"max_turns": 12, "max_turn_tokens": 128, "max_episode_tokens": 2 * ROW})
    config.agent.concurrency = 16
    config.agent.compactions.summary.update({"trigger": ROW - 384, "max_summary_tokens": 128})
    if not is_control:
        expert = "composer_jax.demo.repository_bugs:RepositoryBugTraces"
        config.sft.sources = {"bugs": {"kind": expert, "options": {"count": 8 * sft_steps}}}
    config.sft.update({"steps": sft_steps, "batch_size": batch, "seq_len": TWO_TRACES, "save_every": 10})
    config.sft.router_bias_update_rate = 0.0
    peak = 5e-5 if is_control else 2e-4
    config.sft.optimizer.update({"peak": peak, "warmup": max(1, sft_steps // 10), "final": 0.1})
    config.sampler.update({"slots": 16, "max_model_len": ROW, "decode_steps": 8, "prefill_shapes": ((8, 64), (1, 512))})
    config.rl.groups.update({"bugs": GROUPS})
    config.rl.update({"steps": rl_steps, "group_size": GROUP_SIZE, "compaction": "none"})
    config.rl.update({"save_every": 2, "record_every": 2})
    config.rl.update({"tokens_per_episode": 256.0, "batches": ((ROW, 4),)})
    config.rl.optimizer.update({"peak": 1e-5, "warmup": 1, "decay": "linear", "final": 0.2, "weight_decay": 0.0})
    config.evaluate.suites = {
        "bugs": {
            "family": "bugs",
            "split": "heldout",
            "tasks": tasks,
            "attempts": attempts,
            "compaction": "none",
            "compare_to": "",
            "results": {},
        }
    }
    if is_control:
        config.evaluate.which = ("before",)  # the run has measured the base
    elif of != "smoke":
        config.evaluate.which = ("base", "before", "greedy", "after")
    config.evaluate.headline = ("bugs",)
    return config
