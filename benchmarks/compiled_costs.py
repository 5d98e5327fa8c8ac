"""Our count of a program's cost compared with XLA's: `python -m benchmarks.compiled_costs`.

The program is the gradient of two layers of Moonlight (one dense, one with experts) on four v6e. Each of its loops runs
once, because XLA's cost analysis counts a loop body once. Needs libtpu, no TPU, and some minutes to compile. Prints one
JSON object: HBM traffic and arithmetic of one device by both counts. XLA's traffic includes values that stay on the
chip and the operands of collectives; its arithmetic excludes unknown kernels.
"""

import json

from composer_jax.scale.topology import disable_tpu_hardware


def main() -> None:
    from composer_jax.scale.costs import estimate_cost
    from composer_jax.scale.plan import place_steps
    from configs.moonlight import get_config

    config = get_config("v6e").to_dict()
    config["model"] |= {"n_layers": 2, "vocab_size": 16_384, "head_chunk": None, "expert_chunk": None}
    config["mesh"] |= {"expert": 2}
    config["pretrain"] |= {"batch_size": 8}
    placed = place_steps(config, "v6e:2x2", "pretrain")["train"]
    program = placed.step.programs["gradient"]
    traced = program.function.trace(*program.arguments, **program.keywords)
    ours = estimate_cost(traced.jaxpr, placed.assumed)
    theirs = traced.lower().compile().cost_analysis()
    figures = {
        "hbm_gigabytes": round(ours.hbm_bytes() / 1e9, 1),
        "xla_gigabytes": round(theirs["bytes accessed"] / 1e9, 1),
        "teraflops": round(ours.flops() / 1e12, 2),
        "xla_teraflops": round(theirs["flops"] / 1e12, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    disable_tpu_hardware()
    main()
