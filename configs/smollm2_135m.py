"""SmolLM2-135M-Instruct, a real pretrained model: it learns to repair bugs with the tools of repositories.

    bash launch/smollm2.sh                                                      # fetches the model, then every stage
    python -m launch.pipeline --config=smollm2_135m --config.base=hf:DIR --workdir=runs/smollm2

`smollm2_135m:long` is the same with as many steps as fit into eight hours on two cores; `smollm2_135m:smoke` takes one
step of each stage. `short_rft` and `long_rft` are controls of those runs, whose base is the checkpoint after SFT: SFT
on the solved ones of its own episodes (sft.data), once. `card` is for one GPU, with tasks that SFT leaves unsolved:
python -m benchmarks.published_rl runs it with its controls. Numbers are ours (not published).
"""

import dataclasses

from ml_collections import ConfigDict

from composer_jax.agent.prompts.system import SYSTEM
from composer_jax.data.chat.tool_prompt import SHORT_TOOL_PROMPT
from composer_jax.errors import UserError
from composer_jax.schema import sections as cfg
from composer_jax.tasks.task import Split

TWO_TRACES = 1792
"""Tokens of a row of SFT, which holds two traces of the expert: they have 865 tokens on average."""


@dataclasses.dataclass(frozen=True)
class Size:
    """What the sizes differ in; the defaults are those for two CPU cores."""

    sft_steps: int
    rl_steps: int
    tasks: int
    """Held-out tasks of a suite."""
    attempts: int
    """At each of them."""
    groups: int = 2
    """Groups of every family of RL in a step."""
    group_size: int = 8
    families: tuple[str, ...] = ("bugs",)
    """Of RL and of the suites."""
    generalises_to: tuple[str, ...] = ()
    """Families of which a suite has tasks of the split "unseen", which has a kind of bug that training lacks."""
    row: int = 1152
    """Tokens of the sampler's contexts and of RL's training rows. An episode without a summary is not longer."""
    rows: int = 4
    """Of a training batch of RL."""
    max_turns: int = 12
    compaction: str = "none"
    """Of the episodes of RL and of the suites."""
    prefill_shapes: tuple[tuple[int, int], ...] = ((8, 64), (1, 512))
    compute_dtype: str = "float32"

    @property
    def episodes(self) -> int:
        """Of a step of RL."""
        return len(self.families) * self.groups * self.group_size


CARD = Size(
    20,
    50,
    tasks=48,
    attempts=8,
    groups=4,
    families=("two_bugs", "unnamed_bugs"),
    generalises_to=("bugs",),
    row=2048,
    rows=16,
    max_turns=20,
    compaction="summary",
    prefill_shapes=((64, 64), (8, 512)),
    compute_dtype="bfloat16",
)
IN_SMALL = {"sft_steps": 1, "rl_steps": 2, "tasks": 1, "attempts": 2, "groups": 1, "rows": 4, "max_turns": 3}
SIZES = {
    "short": Size(20, 6, tasks=24, attempts=2),
    "long": Size(20, 60, tasks=64, attempts=4),
    "smoke": Size(1, 1, tasks=1, attempts=2),
    "card": CARD,
    "card_smoke": dataclasses.replace(
        CARD, **IN_SMALL, prefill_shapes=Size.prefill_shapes, compute_dtype=Size.compute_dtype
    ),
}
"""card_smoke is `card` in small, for any machine."""
RFT = "_rft"
"""Ends the size of a run's control by rejection-sampling fine-tuning."""


def get_config(size: str = "short") -> ConfigDict:
    """size: one of SIZES, or one with RFT behind it."""
    is_control, of = size.endswith(RFT), size.removesuffix(RFT)
    if of not in SIZES:
        raise UserError(f"configs/smollm2_135m.py has no size {size!r}; use {', '.join(SIZES)}, or one with {RFT}.")
    sizes, batch = SIZES[of], 4
    sft_steps = sizes.sft_steps
    if is_control:  # a row holds two traces; three quarters of the episodes that RL samples are solved
        sft_steps = max(1, sizes.episodes * sizes.rl_steps * 3 // 4 // 2 // batch)
    suites = {name: suite(sizes, name, "heldout") for name in sizes.families}
    suites |= {f"unseen_{name}": suite(sizes, name, "unseen") for name in sizes.generalises_to}
    which = ("base", "before", "after") if of == "smoke" else ("base", "before", "greedy", "after")
    expert = cfg.TraceSourceConfig(
        "composer_jax.demo.repository_bugs:RepositoryBugTraces", {"count": 8 * sft_steps, "first": 0}
    )
    return cfg.config_dict(
        cfg.RunConfig(
            model=cfg.ModelOfBase(
                compute_dtype=sizes.compute_dtype, head_chunk=512, remat_saves=("attention", "feed_forward")
            ),
            stages=("sft",) if is_control else ("sft", "rl"),
            mesh=cfg.MeshConfig(cpu_devices=1, replica=1),
            data=cfg.DataConfig(tool_prompt=SHORT_TOOL_PROMPT),
            tasks=cfg.TasksConfig(
                families={
                    "bugs": "composer_jax.demo.repository_bugs:RepositoryBugs",
                    "two_bugs": "composer_jax.demo.repository_bugs:TwoRepositoryBugs",
                    "unnamed_bugs": "composer_jax.demo.repository_bugs:UnnamedRepositoryBugs",
                }
            ),
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
            agent=agent(sizes),
            sampler=cfg.SamplerConfig(
                slots=sizes.episodes, max_model_len=sizes.row, prefill_shapes=sizes.prefill_shapes
            ),
            rl=reinforcement_learning(sizes),
            evaluate=cfg.EvaluateConfig(
                suites=suites,
                which=("before",) if is_control else which,  # the run has measured the base
                headline=tuple(suites),
            ),
        )
    )


def agent(sizes: Size) -> cfg.AgentConfig:
    return cfg.AgentConfig(
        limits=cfg.EpisodeLimits(max_turns=sizes.max_turns, max_turn_tokens=128, max_episode_tokens=2 * sizes.row),
        compactions={"none": cfg.Compaction(), "summary": cfg.Compaction(sizes.row - 384, max_summary_tokens=128)},
        system_prompt=SYSTEM,
    )


def suite(sizes: Size, family: str, split: Split) -> cfg.SuiteConfig:
    return cfg.SuiteConfig(family, split, sizes.tasks, sizes.attempts, sizes.compaction)


def reinforcement_learning(sizes: Size) -> cfg.RLConfig:
    return cfg.RLConfig(
        steps=sizes.rl_steps,
        groups=cfg.DISK_FAMILIES | dict.fromkeys(sizes.families, sizes.groups),
        group_size=sizes.group_size,
        compaction=sizes.compaction,
        tokens_per_episode=256.0,
        batches=((sizes.row, sizes.rows),),
        optimizer=cfg.OptimizerConfig(peak=1e-5, warmup=1, decay="linear", final=0.2, weight_decay=0.0),
        save_every=2,
        record_every=2,
    )
