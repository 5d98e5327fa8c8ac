"""GRPO on completions with google-tunix's learner: `python -m benchmarks.peers.train_tunix --model=FILE`.

--model is a JSON file with the fields of its Llama network (benchmarks/peers/equal_cost.py), whose weights are random
and float32. The prompts, the reward and the numbers are those of benchmarks/grpo_completions.py. There is no KL, so
that no reference is computed, and the rollout samples all completions of a step in one call. It has one CPU device,
with which it is faster than with two. A step is timed from one call of the reward to the next.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.peers.completions import ENDS, GROUP, MAX_TOKENS, PROMPT_TOKENS, PROMPTS, figures, prompt, reward
from benchmarks.peers.play_tunix import NumberTokenizer, load_model


def train(model: Any, steps: int) -> list[float]:
    """Returns the seconds of all steps but the last."""
    import jax
    import numpy as np
    import optax
    from tunix.rl import rl_cluster as clusters  # pyright: ignore[reportMissingImports]
    from tunix.rl.grpo import grpo_learner  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT)
    config = clusters.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        training_config=clusters.RLTrainingConfig(
            actor_optimizer=optax.adamw(1e-4),
            eval_every_n_steps=10**9,
            max_steps=steps,
            mini_batch_size=PROMPTS,
            train_micro_batch_size=2,  # 16 completions, as in our batches
            rollout_micro_batch_size=PROMPTS,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=MAX_TOKENS,
            max_prompt_length=PROMPT_TOKENS,
            kv_cache_size=PROMPT_TOKENS + MAX_TOKENS,
            temperature=1.0,
            eos_tokens=list(ENDS),
        ),
    )
    vocab_size, moments = model.config.vocab_size, []

    def rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        moments.append(time.perf_counter())
        return [reward([int(word) for word in text.split()]) for text in completions]

    cluster = clusters.RLCluster(actor=model, tokenizer=NumberTokenizer(vocab_size), cluster_config=config)
    learner = grpo_learner.GRPOLearner(
        cluster, grpo_learner.GRPOConfig(num_generations=GROUP, num_iterations=1, beta=0.0), rewards
    )
    numbers = [range(step * PROMPTS, (step + 1) * PROMPTS) for step in range(steps)]
    texts = [[" ".join(map(str, prompt(n, vocab_size))) for n in step] for step in numbers]
    learner.train([{"prompts": step} for step in texts])
    return [after - before for before, after in zip(moments, moments[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="JSON file of the network")
    parser.add_argument("--steps", type=int, default=13, help="steps, of which the first three are not timed")
    o = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    print(json.dumps(figures(train(load_model(o.model), o.steps))))


if __name__ == "__main__":
    main()
