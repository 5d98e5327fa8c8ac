"""The roofline of composer_jax/scale against steps that others measured: `python -m benchmarks.published_steps`.

DeepSeek-V3 pretraining by MaxText, whose reports give the slice, the batch, the seconds of a step and its own count of
model FLOPs. For each, our step of the same network, batch and slice is traced (not compiled) and predicted. Needs
libtpu (pip install "composer_jax[tpu]"), no TPU. Prints progress on stderr and, as the last line of stdout, one JSON
object: name -> predicted seconds under the three assumptions, published seconds, their ratio, and our model FLOPs over
theirs.

Theirs and ours are alike in what they compute, but not in all: MaxText keeps layer inputs and attention outputs in the
host's memory, which ours does not do (and so would not fit); ours gathers weights in bfloat16 whatever they are stored
in; on TPU7x theirs routes tokens at random. Both shard all weights over all chips and have no expert parallelism.
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
    """Whether attention's three gradients are made by one kernel, or by two that compute the scores twice."""


RECIPES = "github.com/AI-Hypercomputer/tpu-recipes/tree/main/training"
RUNS = {
    "v5p-512-chips": Published(
        "v5p:8x8x8", 512, 3072, 8192, 90.668, 152.415, f"{RECIPES}/v5p/DeepSeek3-671B-MaxText (MaxText 3eb77db)", False
    ),
    # The recipe above, run by others on half of the chips; not published by Google.
    "v5p-256-chips": Published(
        "v5p:4x8x8", 256, 1024, 8192, 68.70, 134.1, "a reproduction of that recipe, July 2026", False
    ),
    "tpu7x-128-chips": Published("tpu7x:4x4x8", 256, 2048, 4096, 27.02, 607.53, f"{RECIPES}/ironwood", True),
    "tpu7x-256-chips": Published("tpu7x:4x8x8", 512, 4096, 4096, 26.79, 612.66, f"{RECIPES}/ironwood", True),
}


def compared(run: Published) -> dict:
    """Predicted and published figures of one run."""
    import jax

    from composer_jax.ops import splash
    from composer_jax.scale.plan import predict_stage
    from configs.kimi_k2_5 import get_config

    jax.clear_caches()  # traces know nothing of the module constant that is changed below

    config = get_config("8k").to_dict()
    config["model"] |= _deepseek_v3()
    config["mesh"] |= {"data": run.devices, "expert": 1}
    config["batch"] |= {"rows": run.rows, "seq_len": run.seq_len}
    with mock.patch.object(splash, "MOST_PARTS", splash.MOST_PARTS if run.one_backward_kernel else 0):
        predicted = predict_stage(config, run.topology, "pretrain")
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
    """The recipes keep the input of each layer (one of them the output of attention's projection as well, of which the
    kernel has no use), so that attention is computed twice. Groups of experts, which limit where a token goes, are left
    out: they change no product."""
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
        figures[name] = compared(run)
        ratio = figures[name]["predicted_over_published"]
        print(f"{name}: predicted over published {ratio:.2f}", file=sys.stderr, flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    disable_tpu_hardware()
    main()
