"""configs/tiny.py:smoke or :sharded with a smaller network and less of everything: get_config takes the size."""

from ml_collections import ConfigDict

from configs import tiny

NETWORK = {
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_dim": 8,
    "qk_rope_dim": 8,
    "v_head_dim": 8,
    "dense_ff_dim": 32,
    "expert_ff_dim": 16,
    "n_shared_experts": 1,
    "scan_unroll": 1,
}


def get_config(size: str) -> ConfigDict:
    config = tiny.get_config(size)
    config.model.update(NETWORK)
    for name in ("one_bug", "three_bugs"):
        del config.evaluate.suites[name]
    for suite in config.evaluate.suites.values():
        suite.tasks = 1
    if size == "smoke":
        config.mesh.replica = 2  # where there are eight devices, too
    else:
        for name in ("bugfix", "unseen", "chain_whole", "chain", "chain_long"):
            del config.evaluate.suites[name]
        config.pretrain.update({"steps": 4, "evaluate_every": 2, "save_every": 4})
        config.sft.update({"steps": 2, "save_every": 2})
        config.rl.update({"steps": 1, "group_size": 2})
        config.evaluate.which, config.evaluate.headline = ("after",), ("two_bugs",)
    return config
