"""RL from random weights, small enough for engines in processes of their own: get_config takes where versions go."""

from ml_collections import ConfigDict

from tests.stages import smoke_config

STEPS = 3
"""The groups of the last one have weights of the first."""


def get_config(publish: str) -> ConfigDict:
    config = smoke_config.get_config("smoke")
    config.stages = ("rl",)
    config.mesh.reduction = "collective"
    config.evaluate.every = {}
    config.agent.limits.max_turns = 2
    # As launch.serve chooses them for --slots=4, and for each of the two replicas that sample here.
    config.sampler.update({"slots": 8, "prefill_shapes": ((8, 32), (2, 256)), "decode_steps": 4})
    config.sampler.update({"param_dtype": "bfloat16", "max_model_len": 512})
    config.rl.update({"steps": STEPS, "group_size": 2, "max_staleness": 1, "deterministic": True, "save_every": STEPS})
    config.rl.update({"publish": publish, "weight_check_every": 1, "batches": ((512, 4),)})
    config.rl.algorithm.update({"name": "tests.stages.two_hosts_config:FixedBaseline", "options": {}})
    config.rl.keep_groups = True
    return config
