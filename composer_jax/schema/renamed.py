"""Fields of older config schemas: their names of today, and what replaces those that are gone."""

from collections.abc import Mapping
from typing import Any

from composer_jax.schema.config_dict import field_paths

RENAMED: dict[str, str] = {
    "tensorboard": 'metric_sinks=("tensorboard",)',
    "sampler.capacity": "sampler.max_model_len",
    "pretrain.bias_rate": "pretrain.router_bias_update_rate",
    "sft.bias_rate": "sft.router_bias_update_rate",
    "phases.NAME.bias_rate": "phases.NAME.router_bias_update_rate",
    "rl.curriculum.climb_at": "rl.curriculum.promote_above",
}

REMOVED: dict[str, str] = {
    "rl.algorithm.options.length_weighted": "use the mean of the rewards, which is the default, or leave_one_out",
    "rl.algorithm.segment_discount": "all segments of an episode have its advantage, which was the default",
    "rl.algorithm.imitation_weight": "fine-tune on solved episodes (launch.traces --min_reward=1, sft.data)",
    "rl.keep_cache": "episodes that run keep their cache; to recompute it, serve the weights (POST /update_weights)",
    "rl.loss.sequence_mask": "use rl.loss.dual_clip, and a smaller rl.max_staleness",
    "rl.algorithm.toggle": "set a price of length with rl.reward.weight",
    "rl.algorithm.mask_overlong": "episodes that a limit ended are trained like others",
    "rl.algorithm.incomplete_groups": "a group that lost less than half of its episodes is trained with the rest",
    "rl.reward.zeroed": "the columns flag_NAME count flags; give one a price as a behaviour of your own "
    "(rl.reward.behaviors)",
    "rl.reward.penalties.comment_limit": "use the limit of 0.5, or a behaviour of your own (rl.reward.behaviors)",
    "agent.compactions.NAME.history_file": "a summary keeps what its request asks for (request)",
}
"""Field or section -> what to use instead, as the end of the sentence "FIELD is gone: ...". NAME is any name."""


def outdated_field(path: str) -> str:
    """Returns "a is now b" or "a is gone: use d" for the path of a field that is outdated or lies in a section that is;
    "" for another one."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        for table, verb in ((RENAMED, "is now "), (REMOVED, "is gone: ")):
            for pattern, instead in table.items():
                of_pattern = pattern.split(".")
                if len(of_pattern) == end and all(a in ("NAME", b) for a, b in zip(of_pattern, parts, strict=False)):
                    return f"{name} {verb}{instead}"
    return ""


def outdated_fields(values: Mapping[str, Any]) -> str:
    """Returns what `outdated_field` says of the fields of a config, each once, separated by semicolons."""
    return "; ".join(dict.fromkeys(filter(None, map(outdated_field, field_paths(values)))))
