"""Reinforcement learning as one loop, without a run's folder: `python -m examples.rl_loop`.

A step plays a group of episodes of one task, grades them, computes advantages, takes one optimizer step and gives the
new weights to the sampler. A network of random weights solves no task, so `grade` rewards what such a network can learn
in seconds. `composer_jax.train_rl` is the stage that does all this at scale and survives being killed.
"""

import jax
import numpy as np

from composer_jax import Episode, Learner, ModelConfig, ModelDef, Sampler, Tokenizer, run_group
from composer_jax.agent import EpisodeLimits, EpisodeSettings
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.demo.bugfix import Bugfix
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl.algorithm import GroupAdvantage, broadcast_advantages
from composer_jax.rl.batch import Group, pack_rows
from composer_jax.sampler.config import SamplerConfig
from composer_jax.train.losses import LossTermNormalisers, PolicyLossConfig, make_loss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer

STEPS, GROUP_SIZE, CONTEXT = 8, 16, 256
SETTINGS = EpisodeSettings(EpisodeLimits(max_turns=1, max_turn_tokens=32))
NETWORK = dict(d_model=64, n_layers=2, n_heads=4, kv_lora_rank=32, qk_nope_dim=16, qk_rope_dim=8, v_head_dim=16)


def grade(episode: Episode) -> float:
    """Returns the grade of the hidden tests plus the fraction of the sampled tokens that occur in the prompt."""
    (row,) = episode.transcript.rows()
    return (episode.reward or 0.0) + float(np.isin(row.tokens[row.trained], row.tokens[~row.trained]).mean())


def main(steps: int = STEPS) -> list[float]:
    """Returns the mean reward of each step."""
    tasks = [Bugfix().generate("train", seed=0, index=step) for step in range(steps)]
    tokenizer = Tokenizer.train([text for task in tasks for text in (task.instruction, *task.files.values())], 300)
    chat, mesh = CompactFormat(tokenizer), make_mesh(jax.devices()[:1])
    sizes = ModelConfig(tokenizer.vocab_size, max_context=CONTEXT, dense_ff_dim=128, compute_dtype="float32", **NETWORK)
    network, optimizer = ModelDef(sizes), make_optimizer(OptimizerConfig(peak=3e-3, decay="constant"), steps)
    learner = Learner(network, optimizer, make_loss(PolicyLossConfig()), mesh)
    sampler = Sampler(network, mesh, SamplerConfig(GROUP_SIZE, CONTEXT), end_tokens=chat.end_tokens)
    state = learner.init_state(*network.init(seed=0))
    mean_rewards = []
    for step, task in enumerate(tasks):
        # Sample: the episodes of a group differ in their seeds only. One without a reward was lost with its sandbox.
        sampler.update(state.params, state.router_bias, version=step)
        seeds = range(step * GROUP_SIZE, (step + 1) * GROUP_SIZE)
        played = run_group(task, sampler, seeds, chat=chat, settings=SETTINGS)
        episodes = [episode for episode in played if episode.reward is not None]
        # Grade, and compare each episode with the mean of its group.
        rewards = [grade(episode) for episode in episodes]
        advantages_G = GroupAdvantage()(rewards)
        rows = [row for rows in broadcast_advantages(Group(episodes, rewards), advantages_G) for row in rows]
        # Update: the loss is a mean over the sampled tokens; its other terms are off.
        tokens = sum(np.count_nonzero(row.weights) for row in rows)
        batches = pack_rows(rows, shapes=[(CONTEXT, GROUP_SIZE)]).batches
        state, metrics = learner.step(state, batches, LossTermNormalisers(tokens, cross_entropy=1, kl=1))
        mean_rewards.append(float(np.mean(rewards)))
        print(f"step {step + 1}: reward {mean_rewards[-1]:.3f}, loss {metrics['loss']:.3f}, {tokens} tokens")
    return mean_rewards


if __name__ == "__main__":
    main()
