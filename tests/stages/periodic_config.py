"""SFT or RL of a small published model with a suite after every second step: get_config takes the model's folder."""

from ml_collections import ConfigDict

from tests.stages import two_hosts_config


def get_config(base: str) -> ConfigDict:
    config = two_hosts_config.get_config(base)
    config.mesh.update({"cpu_devices": 1, "data": 1, "expert": 1})
    config.sampler.slots = 4
    config.sft.update({"seq_len": 4096, "batch_size": 2, "steps": 2})
    config.rl.update({"steps": 4, "save_every": 1})
    config.evaluate.suites.bugs.update({"tasks": 6, "attempts": 4})
    config.evaluate.every = {"bugs": 2}
    return config
