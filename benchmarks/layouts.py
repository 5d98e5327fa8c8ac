"""How Kimi K2.5's training step came to be laid out as configs/kimi_k2_5.py has it: `python -m benchmarks.layouts`.

Pretraining at 32k on 1,024 TPU v5p, predicted by the roofline of composer_jax/scale with one change after the other and
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
    "batch": {"rows": 1024},
    "model": {"remat_saves": (), "expert_chunk": 8192},
}
STEPS = {
    "a row per chip, two backward kernels of attention, experts in chunks": WHOLE_ROWS,
    "one backward kernel": WHOLE_ROWS,
    "half a row per chip, attention kept": {"model": {"expert_chunk": 8192}},
    "experts for all tokens at once": {},
}
"""What each still differs in from configs/kimi_k2_5.py."""


def main() -> None:
    import jax

    from composer_jax.ops import splash
    from composer_jax.scale.plan import predict_stage
    from configs.kimi_k2_5 import TOKENS, get_config

    figures = {}
    for name, differences in STEPS.items():
        config = get_config("32k").to_dict()
        for group, fields in differences.items():
            config[group] |= fields
        parts = splash.MOST_PARTS if figures else 0  # of the dq that the one kernel adds up; 0 takes the two kernels
        jax.clear_caches()  # traces know nothing of this module constant
        with mock.patch.object(splash, "MOST_PARTS", parts):
            predicted = predict_stage(config, TOPOLOGY, "pretrain")
        share = TOKENS / (config["batch"]["rows"] * config["batch"]["seq_len"])
        seconds, mfu = predicted["predicted_step_seconds"] * share, predicted["predicted_mfu"]
        profile = {kind: part * share for kind, part in predicted["profile_seconds"].items()}
        figures[name] = {"seconds": seconds, "mfu": mfu, "profile_seconds": profile}
        print(f"{name}: {seconds:.1f} s, MFU {mfu:.1%}", file=sys.stderr, flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    disable_tpu_hardware()
    main()
