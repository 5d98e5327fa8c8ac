"""Speeds of a config's learner and rollout engine on a kind of chip, as the roofline predicts them (scale/roofline.py).

The programs are traced and not compiled, which takes seconds. These are predictions: docs/scale.md compares the
training step with measured ones; decoding and prefill have been compared with none.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from composer_jax.parallel.mesh import batch_shards
from composer_jax.scale.plan import PlacedStep, place_steps, predict_step
from composer_jax.scale.simulation.roles import Speeds

_PUBLISHED_BYTES = 2
"""Bytes of a published weight: rl.publish writes bfloat16."""


def predict_speeds(config: Mapping[str, Any], topology: str, context_fill: float) -> Speeds:
    """Predicts the learner's step, decode steps with several numbers of conversations, and prefill.

    The learner's speed is that of rl.batches on the whole slice, per chip. The engine is that of `sampler`, whose mesh
    has one or more replicas on the slice.

    Args:
      topology: such as v5p:8x8x16.
      context_fill: mean tokens of a running context, as a fraction of sampler.max_model_len.

    Raises:
      UserError: an unknown field or slice, or sizes that do not fit each other.
    """
    steps = place_steps(config, topology, "rl")
    train, decode = predict_step(steps["train"]), steps["decode"]
    replicas = decode.step.mesh.shape["replica"]
    values = ConfigDict(config).to_dict()
    sampler = values["sampler"]
    slots, unit = sampler["slots"], batch_shards(decode.step.mesh)
    sampler["max_model_len"] = context = max(2, round(context_fill * sampler["max_model_len"]))
    counts = [unit]
    while counts[-1] < slots:
        counts.append(min(2 * counts[-1], slots))
    decode_steps, steps = [], {}
    for count in counts:
        sampler["slots"] = count
        steps = place_steps(values, topology, "evaluate")
        decode_steps.append((count // replicas, predict_step(steps["decode"])["predicted_step_seconds"]))
    return Speeds(
        trained_tokens_per_s=train["predicted_tokens_per_second_per_chip"],
        replica_chips=decode.tpus.chips // replicas,
        decode_steps=tuple(decode_steps),
        prefill_s=_prefill_seconds(steps) * replicas,
        weight_bytes=_PUBLISHED_BYTES * float(train["params_total"]),
        mean_context=context,
    )


def _prefill_seconds(steps: Mapping[str, PlacedStep]) -> float:
    """Returns the seconds per token of the prefill call that is fastest per token, on all replicas, rows full."""
    predicted = [predict_step(placed) for name, placed in steps.items() if name.startswith("prefill")]
    return min(step["predicted_step_seconds"] / step["tokens_per_step"] for step in predicted)
