"""Layouts of Kimi K2.5's training step that led to configs/kimi_k2_5.py: `python -m benchmarks.layouts`.

Predicts pretraining at 32k on 1,024 TPU v5p by the roofline of composer_jax/scale for one change after another, with
the same constants. Needs libtpu (pip install "composer_jax[tpu]"), no TPU. Prints progress on stderr and, as the last
line of stdout, one JSON object: step -> seconds per 16.8 million tokens, MFU, profile.
"""

import json
import sys
from unittest import mock

from composer_jax.scale.topology import disable_tpu_hardware

TOPOLOGY = "v5p:8x8x16"
WHOLE_ROWS = {
    "mesh": {"context": 1},
    "pretrain": {"batch_size": 1024},
    "model": {"remat_saves": (), "expert_chunk": 8192},
}
STEPS = {
    "a row per chip, two backward kernels of attention, experts in chunks": WHOLE_ROWS,
    "one backward kernel": WHOLE_ROWS,
    "half a row per chip, attention kept": {"model": {"expert_chunk": 8192}},
    "experts for all tokens at once": {},
}
"""Layout -> its differences from configs/kimi_k2_5.py."""


def main() -> None:
    import jax

    from composer_jax.ops import splash
    from composer_jax.scale.plan import place_steps, predict_step
    from configs.kimi_k2_5 import TOKENS, get_config

    figures = {}
    for name, differences in STEPS.items():
        config = get_config("32k").to_dict()
        for group, fields in differences.items():
            config[group] |= fields
        parts = splash.MOST_PARTS if figures else 0  # parts of dq that one kernel adds up; 0 selects two kernels
        jax.clear_caches()  # cached traces do not depend on this module constant
        with mock.patch.object(splash, "MOST_PARTS", parts):
            predicted = predict_step(place_steps(config, TOPOLOGY, "pretrain")["train"])
        scale = TOKENS / (config["pretrain"]["batch_size"] * config["pretrain"]["seq_len"])
        seconds, mfu = predicted["predicted_step_seconds"] * scale, predicted["predicted_mfu"]
        profile = {kind: part * scale for kind, part in predicted["profile_seconds"].items()}
        figures[name] = {"seconds": seconds, "mfu": mfu, "profile_seconds": profile}
        print(f"{name}: {seconds:.1f} s, MFU {mfu:.1%}", file=sys.stderr, flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    disable_tpu_hardware()
    main()
