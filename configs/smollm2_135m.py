"""SmolLM2-135M-Instruct, a real pretrained model, on one CPU: it learns to repair bugs with the tools of repositories.

    bash launch/smollm2.sh                                                      # fetches the model, then every stage
    python -m launch.pipeline --config=smollm2_135m --config.base=hf:DIR --workdir=runs/smollm2

`smollm2_135m:long` is the same with as many steps as fit into eight hours on two cores; `smollm2_135m:smoke` takes one
step of each stage. `short_rft` and `long_rft` are controls of those runs, whose base is the checkpoint after SFT: SFT
on the solved ones of its own episodes (sft.data), once. Numbers are ours (not published).
"""

from ml_collections import ConfigDict

from composer_jax.agent.prompts.system import SYSTEM
from composer_jax.data.chat.tool_prompt import SHORT_TOOL_PROMPT
from composer_jax.errors import UserError
from composer_jax.schema import sections as cfg

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
    which = ("base", "before", "after") if of == "smoke" else ("base", "before", "greedy", "after")
    expert = cfg.TraceSourceConfig("composer_jax.demo.repository_bugs:RepositoryBugTraces", {"count": 8 * sft_steps})
    return cfg.config_dict(
        cfg.RunConfig(
            model=cfg.ModelOfBase(compute_dtype="float32", head_chunk=512, remat_saves=("attention", "feed_forward")),
            stages=("sft",) if is_control else ("sft", "rl"),
            mesh=cfg.MeshConfig(cpu_devices=1, replica=1),
            data=cfg.DataConfig(tool_prompt=SHORT_TOOL_PROMPT),
            tasks=cfg.TasksConfig(families={"bugs": "composer_jax.demo.repository_bugs:RepositoryBugs"}),
            sft=cfg.SFTConfig(
                sources={} if is_control else {"bugs": expert},
                steps=sft_steps,
                batch_size=batch,
                seq_len=TWO_TRACES,
                router_bias_update_rate=0.0,
                save_every=10,
                optimizer=cfg.OptimizerConfig(
                    peak=5e-5 if is_control else 2e-4, warmup=max(1, sft_steps // 10), final=0.1
                ),
            ),
            agent=cfg.AgentConfig(
                limits=cfg.EpisodeLimits(max_turns=12, max_turn_tokens=128, max_episode_tokens=2 * ROW),
                compactions={"none": cfg.Compaction(), "summary": cfg.Compaction(ROW - 384, max_summary_tokens=128)},
                system_prompt=SYSTEM,
            ),
            sampler=cfg.SamplerConfig(max_model_len=ROW, prefill_shapes=((8, 64), (1, 512))),
            rl=reinforcement_learning(rl_steps),
            evaluate=cfg.EvaluateConfig(
                suites={"bugs": cfg.SuiteConfig("bugs", tasks=tasks, attempts=attempts)},
                which=("before",) if is_control else which,  # the run has measured the base
                headline=("bugs",),
            ),
        )
    )


def reinforcement_learning(steps: int) -> cfg.RLConfig:
    return cfg.RLConfig(
        steps=steps,
        groups=cfg.DISK_FAMILIES | {"bugs": GROUPS},
        group_size=GROUP_SIZE,
        compaction="none",
        tokens_per_episode=256.0,
        batches=((ROW, 4),),
        optimizer=cfg.OptimizerConfig(peak=1e-5, warmup=1, decay="linear", final=0.2, weight_decay=0.0),
        save_every=2,
        record_every=2,
    )
