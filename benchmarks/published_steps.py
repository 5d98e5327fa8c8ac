"""The roofline of composer_jax/scale compared with measured steps: `python -m benchmarks.published_steps`.

The measurements are of DeepSeek-V3 pretraining by MaxText, whose reports give slice, batch, seconds of a step and model
FLOPs. For each, our step of the same network, batch and slice is traced (not compiled) and predicted. Needs
libtpu (pip install "composer_jax[tpu]"), no TPU. Prints progress on stderr and, as the last line of stdout, one JSON
object: name -> predicted seconds under the three assumptions, published seconds, their ratio, and our model FLOPs over
theirs.

The programs differ in three points: MaxText keeps layer inputs and attention outputs in the host's memory, and ours,
which does not, would not fit; ours gathers weights in bfloat16 whatever their storage dtype; MaxText routes tokens at
random on TPU7x. Both shard all weights over all chips without expert parallelism.
"""

import dataclasses
import json
import sys
from unittest import mock

from composer_jax.scale.topology import disable_tpu_hardware


@dataclasses.dataclass(frozen=True)
class Published:
    topology: str
    devices: int
    rows: int
    seq_len: int
    seconds: float
    teraflops: float
    """Per second and chip."""
    source: str
    one_backward_kernel: bool
    """Whether one kernel computes the three gradients of attention, or two that each compute the scores."""


RECIPES = "github.com/AI-Hypercomputer/tpu-recipes/tree/main/training"
RUNS = {
    "v5p-512-chips": Published(
        "v5p:8x8x8", 512, 3072, 8192, 90.668, 152.415, f"{RECIPES}/v5p/DeepSeek3-671B-MaxText (MaxText 3eb77db)", False
    ),
    # The recipe above on half of the chips, by others; not published by Google.
    "v5p-256-chips": Published(
        "v5p:4x8x8", 256, 1024, 8192, 68.70, 134.1, "a reproduction of that recipe, July 2026", False
    ),
    "tpu7x-128-chips": Published("tpu7x:4x4x8", 256, 2048, 4096, 27.02, 607.53, f"{RECIPES}/ironwood", True),
    "tpu7x-256-chips": Published("tpu7x:4x8x8", 512, 4096, 4096, 26.79, 612.66, f"{RECIPES}/ironwood", True),
}


def compare(run: Published) -> dict:
    """Returns predicted and published figures of one run."""
    import jax

    from composer_jax.ops import splash
    from composer_jax.scale.plan import place_steps, predict_step
    from configs.kimi_k2_5 import get_config

    jax.clear_caches()  # cached traces do not depend on the module constant that is changed below

    config = get_config("8k").to_dict()
    config["model"] |= _deepseek_v3()
    # The recipes do not say in which dtype they sum gradients; this is their compute dtype.
    config["mesh"] |= {"data": run.devices, "expert": 1, "reduce_dtype": "bfloat16"}
    config["pretrain"] |= {"batch_size": run.rows, "seq_len": run.seq_len}
    with mock.patch.object(splash, "MOST_PARTS", splash.MOST_PARTS if run.one_backward_kernel else 0):
        predicted = predict_step(place_steps(config, run.topology, "pretrain")["train"])
    chips = predicted["chips"]
    return {
        "predicted_seconds": predicted["step_seconds"],
        "published_seconds": run.seconds,
        "predicted_over_published": predicted["predicted_step_seconds"] / run.seconds,
        "model_flops_over_theirs": predicted["flops_per_step"] / (run.seconds * run.teraflops * 1e12 * chips),
        "profile_seconds": predicted["profile_seconds"],
        "source": run.source,
    }


def _deepseek_v3() -> dict:
    """Returns the model fields of the recipes.

    The recipes keep only the input of each layer (one also the output of attention's projection, which the kernel does
    not use), so attention is computed twice. Expert groups, which change no product, are left out.
    """
    from composer_jax.models.presets import PRESETS

    return dataclasses.asdict(PRESETS["deepseek_v3"]) | {
        "n_expert_groups": 1,
        "topk_groups": 1,
        "param_dtype": "float32",
        "compute_dtype": "bfloat16",
        "dispatch": "ring",
        "remat": True,
        "remat_saves": (),
        "head_chunk": 4096,
        "expert_chunk": None,
    }


def main() -> None:
    figures = {}
    for name, run in RUNS.items():
        figures[name] = compare(run)
        ratio = figures[name]["predicted_over_published"]
        print(f"{name}: predicted over published {ratio:.2f}", file=sys.stderr, flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    disable_tpu_hardware()
    main()
