"""SFT or RL of a small published model on one device, with a suite every second step: get_config takes its folder."""

from ml_collections import ConfigDict

from tests.stages import two_hosts_config


def get_config(base: str) -> ConfigDict:
    config = two_hosts_config.get_config(base)
    config.mesh.update({"cpu_devices": 1, "data": 1, "expert": 1})
    config.sampler.slots = 4
    config.sft.update({"batch_size": 2, "steps": 5, "save_every": 5})
    config.rl.update({"steps": 6, "save_every": 1, "max_staleness": 2, "batches": ((two_hosts_config.ROW, 4),)})
    config.evaluate.suites.bugs.update({"tasks": 6, "attempts": 4})
    return config
