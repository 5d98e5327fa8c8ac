"""Time of simulating 200,000 sandboxes that all play for a day: `python -m benchmarks.simulation`.

The engines and the learner are large enough to keep 200,000 sandboxes in use, so that this is the most events that a
simulated day has. Speeds are given and not predicted: libtpu is not needed. Prints one JSON object.

    --sandboxes=N --hours=H --parts=K: smaller or larger cases
"""

import argparse
import dataclasses
import json
import resource
import time

from composer_jax.observe.progress import Progress
from composer_jax.rl.config import RLConfig
from composer_jax.scale.simulation.assumptions import Assumptions
from composer_jax.scale.simulation.roles import Fleet, Speeds, TokenBytes, make_roles
from composer_jax.scale.simulation.simulation import HOUR_S, Simulation
from composer_jax.scale.simulation.workload import DrawnWorkload

SPEEDS = Speeds(
    trained_tokens_per_s=458.0,
    replica_chips=128,
    decode_steps=((16, 0.0151), (32, 0.0179), (64, 0.0304), (128, 0.0399)),
    prefill_s=1 / 34_600,
    weight_bytes=2.05e12,
    mean_context=16_384,
)
"""About those that launch.simulate predicts for Kimi K2.5 on v5p."""
SIZES = TokenBytes(route=0, batch=0, batch_tokens=0, call_tokens=8)
"""Messages take no time: one process would not carry those of 200,000 sandboxes."""
WARM_UP_HOURS = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandboxes", type=int, default=200_000)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--parts", type=int, default=1)
    args = parser.parse_args()
    # 3.2 episodes per sandbox are outstanding, and the engines hold a session for every sandbox.
    config = RLConfig(groups={"repository": args.sandboxes // 25}, group_size=16, max_staleness=4, late_groups="drop")
    assumed = Assumptions(message_s=0.0, message_bytes_per_s=float("inf"))
    workload = DrawnWorkload(assumed, group_size=16, max_model_len=32_768, max_turns=400)
    fleet = Fleet(2 * args.sandboxes, 128 * (args.sandboxes // 100), args.sandboxes)
    roles = make_roles(fleet, SPEEDS, assumed, workload.prefilled_per_sampled, SPEEDS.decode_steps[-1][0], SIZES)
    simulation = Simulation(config, roles, workload, episode_seconds=14_400.0, parts=args.parts)
    began, cpu_began = time.perf_counter(), time.process_time()
    with Progress(args.hours + WARM_UP_HOURS, "simulated hours", "simulation") as progress:
        outcome = simulation.run(args.hours * HOUR_S, warm_up_s=WARM_UP_HOURS * HOUR_S, on_hour=progress.update)
    figures = {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_began,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "sandboxes": args.sandboxes,
        "parts": args.parts,
    }
    print(json.dumps(figures | dataclasses.asdict(outcome)))


if __name__ == "__main__":
    main()
