"""GRPO on completions without a sandbox, as google-tunix's learner does it: `python -m benchmarks.grpo_completions`.

Every step plays 8 groups of 8 completions of up to 128 tokens to random prompts of 256 tokens, rewards the fraction of
even token ids, and takes one optimizer step with the network of the demo in float32 on the demo's two CPU devices.
Completions end at one of 16 ids, so their lengths differ as those of real episodes do. The orchestrator, the engine,
the ledger and the learner are those of RL, with their defaults, router replay among them. Prints one JSON object:
episodes_per_minute of the median step, and the seconds of the steps after those that compile.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import conversations
from benchmarks.peers.completions import ENDS, GROUP, MAX_TOKENS, PROMPT_TOKENS, PROMPTS, figures, prompt, reward
from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.agent.transcript import Transcript
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import MeshConfig
from composer_jax.parallel.platform import configure_cpu
from composer_jax.rl.config import RLConfig
from composer_jax.rl.learning_step import CompletedStep, Cursor
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.orchestrator import Learning, Orchestrator, Playing, Watchers
from composer_jax.rl.policy_update import PolicyUpdate
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.policy import Policy
from composer_jax.sampler.sampler import Sampler
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Task
from composer_jax.train.learner import Learner
from composer_jax.train.losses import make_loss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from launch.huge_pages import restart_with_huge_pages

MESH = MeshConfig(cpu_devices=2, reduction="host")
"""Of the demo: two replicas, whose gradients the host adds."""
NEVER = Case("completion", "none", (), None)
"""A task needs a grader; the reward of these is computed from the tokens instead."""


class Prompts:
    """The groups of the run: group n completes prompt n."""

    groups_per_step = PROMPTS

    def restore(self, places) -> None:
        """Nothing was drawn before."""

    def draw(self, number: int, results) -> tuple[str, int]:
        """Returns the place of a group."""
        return "completion", number

    def specs(self, number: int) -> list[EpisodeSpec]:
        """Returns the episodes of a group."""
        task = Task(f"completion-{number}", "completion", "train", "", {}, (), CaseGrader((NEVER,)))
        return [EpisodeSpec(task, number * GROUP + i, Compaction(), number) for i in range(GROUP)]


async def complete(spec: EpisodeSpec, policy: Policy, vocab_size: int) -> Episode:
    """Plays one episode: a prompt and its completion."""
    tokens, transcript = prompt(spec.group, vocab_size), Transcript()
    session = await policy.open(spec.seed)
    sample = await session.sample(tokens, SamplingParams(MAX_TOKENS, return_routing=True))
    session.close()
    transcript.append("prompt", tokens)
    transcript.append("assistant", (), sample.tokens, sample.logprobs, sample.versions, routes=sample.routing)
    task = spec.task
    return Episode(task.id, task.family, task.split, spec.seed, transcript, reward(sample.tokens), "finished", turns=1)


def run(steps: int, folder: Path) -> list[dict[str, Any]]:
    """Returns the metrics of every step, of which "step_s" are its seconds."""
    model, mesh = conversations.model_config("demo"), MESH.make_mesh()
    config = RLConfig(
        steps=steps,
        groups={"completion": PROMPTS},
        group_size=GROUP,
        batches=((PROMPT_TOKENS + MAX_TOKENS, 16),),
        tokens_per_episode=64.0,
        optimizer=OptimizerConfig(peak=1e-4),
    )
    optimizer, loss = make_optimizer(config.optimizer, steps), make_loss(config.loss)
    learner = Learner(ModelDef(model), optimizer, loss, mesh, reduction=MESH.reduction)
    state = learner.init_state(*learner.definition.init(0, mesh))
    sizes = SamplerConfig(
        slots=PROMPTS * GROUP,
        max_model_len=PROMPT_TOKENS + MAX_TOKENS,
        decode_steps=16,
        prefill_shapes=((16, 32), (8, PROMPT_TOKENS)),
    )
    sampler = Sampler(ModelDef(config.rollout_network(model)), mesh, sizes, end_tokens=ENDS)
    sampler.update(state.params, state.router_bias, version=0)
    sampler.warm_up()
    rows: list[dict[str, Any]] = []

    def on_step(completed: CompletedStep) -> None:
        assert completed.is_updated
        rows.append(dict(completed.row))
        print(f"step {len(rows)} of {steps}: {rows[-1]['step_s']:.1f} s", file=sys.stderr, flush=True)

    with RolloutLedger(folder) as ledger:
        orchestrator = Orchestrator(
            config,
            Prompts(),  # pyright: ignore[reportArgumentType]: what the orchestrator calls of a GroupSource
            Learning(PolicyUpdate(config, learner), state, Cursor()),
            Playing(
                sampler,
                EpisodeContext(None, None),  # pyright: ignore[reportArgumentType]: no sandboxes
                lambda spec, policy: complete(spec, policy, model.vocab_size),
            ),
            ledger,
            Watchers(on_step),
        )
        asyncio.run(orchestrator.run())
    assert np.isfinite([row["step_s"] for row in rows]).all()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=13, help="steps, of which the first three are not timed")
    o = parser.parse_args()
    configure_cpu(MESH.cpu_devices)
    with tempfile.TemporaryDirectory(prefix="composer-grpo-") as folder:
        print(json.dumps(figures([row["step_s"] for row in run(o.steps, Path(folder))])))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
