"""Our count of a program's cost against XLA's own: `python -m benchmarks.compiled_costs`.

The gradient of two layers of Moonlight (one dense, one of experts) on four v6e, every loop of which runs once, because
XLA's cost analysis counts the inside of a loop once. Needs libtpu, no TPU, and some minutes to compile. Prints one JSON
object: HBM traffic and arithmetic of one device by both counts. XLA counts what stays on the chip, and what collectives
read and write, as traffic too; of kernels that it does not know it counts no arithmetic.
"""

import json

from composer_jax.scale.topology import without_hardware


def main() -> None:
    from composer_jax.scale.costs import cost_of
    from composer_jax.scale.plan import job
    from configs.moonlight import get_config

    config = get_config("v6e").to_dict()
    config["model"] |= {"n_layers": 2, "vocab_size": 16_384, "head_chunk": None, "expert_chunk": None}
    config["mesh"] |= {"expert": 2}
    config["batch"] |= {"rows": 8}
    wanted = job(config, "v6e:2x2", "pretrain")
    program = wanted.work.programs["gradient"]
    traced = program.function.trace(*program.arguments, **program.keywords)
    ours = cost_of(traced.jaxpr, wanted.rules)
    theirs = traced.lower().compile().cost_analysis()
    figures = {
        "hbm_gigabytes": round(ours.hbm_bytes() / 1e9, 1),
        "xla_gigabytes": round(theirs["bytes accessed"] / 1e9, 1),
        "teraflops": round(ours.flops() / 1e12, 2),
        "xla_teraflops": round(theirs["flops"] / 1e12, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    without_hardware()
    main()
