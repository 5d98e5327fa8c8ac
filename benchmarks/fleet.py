"""What a fleet of engines costs, and what it loses when processes are killed.

    python -m benchmarks.fleet [--parts=PART,...]

    scheduler   8 engines of 16 shards and 128 requests on scripted devices, in the steady state (fleet_scheduler.py):
                  scheduler_ms   CPU milliseconds of the host per device call and engine
                  round_ms       the same of a decode call with the prefill call before it
                  default_gc_ms  scheduler_ms with the thresholds of Python's garbage collector (launch/garbage.py)
                  admission_s    CPU seconds in which one scheduler admits 992 requests on 128 shards of 8 rows
    router      1,024 open sessions of 8 scripted engines in another process (fleet_wire.py): router_ms, CPU
                milliseconds of the learner's process per message of 250 tokens; with_routes_ms, with K2.5's routes
    routes      a message of 500 new tokens with K2.5's routes (60 layers, 8 of 384 experts): route_bytes_per_token,
                its bytes on the largest hop over tokens x 60 x 8 x 2
    batches     benchmarks.step_batches: batch_s_per_mtoken, seconds from a step's first row to the last of 4 processes
    scaling     1, 2 and 4 engines of scripted speed in processes of their own (fleet_scaling.py): engine_scaling,
                tokens per second over ideal, the worst of three; learner_idle of each
    kills       20 kills -9, while messages are sampled, among a learner, two engines, one of them of two processes, and
                two workers (fleet_kills.py): kills; met, kills after which a message was sampled again; lost, batches
                that differ from those of an undisturbed run or were trained twice; most_again, messages of one episode
                that were sampled again after one kill, at most

A part that is in the file of rows is not measured again. The last line of stdout is one JSON object with scheduler_ms,
router_ms, route_bytes_per_token, batch_s_per_mtoken, engine_scaling, kills and lost; null for parts without a row.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fleet_kills import measure_kills
from benchmarks.fleet_scaling import ScalingLoad, measure_scaling
from benchmarks.fleet_scheduler import EngineLoad, measure_admission, measure_engines
from benchmarks.fleet_wire import Messages, measure_route_bytes, measure_router
from benchmarks.seeded_runs import SIZES
from benchmarks.traffic_learning_rows import read_rows, write_rows
from launch.garbage import collect_rarely

DEFAULT_GC = gc.get_threshold()
"""Of Python, as long as nobody has changed it."""
CONTRACT = {
    "scheduler": ("scheduler_ms",),
    "router": ("router_ms",),
    "routes": ("route_bytes_per_token",),
    "batches": ("batch_s_per_mtoken",),
    "scaling": ("engine_scaling",),
    "kills": ("kills", "lost"),
}
"""Part -> what the printed object has of its row."""
Row = dict[str, Any]


def measure_scheduler(small: bool) -> Row:
    """Returns the row of the part "scheduler"."""
    shards = 4 if small else 128
    load = EngineLoad(1, 16, 20, 2048, 256, (10, 30), (10, 30), 10) if small else EngineLoad()
    row = {"admission_s": measure_admission(shards, 8, 8 * shards * 31 // 32), **measure_engines(load)}
    gc.set_threshold(*DEFAULT_GC)
    try:
        return row | {"default_gc_ms": measure_engines(load)["scheduler_ms"]}
    finally:
        collect_rarely()


def measure_messages(small: bool) -> Row:
    """Returns the row of the part "router"."""
    messages = Messages(2, 100, 20, 20) if small else Messages()
    plain = measure_router(16 if small else 1024, 2 if small else 8, 4 if small else 8, messages)
    routed = measure_router(8 if small else 64, 2 if small else 8, 4 if small else 8, messages, routes=True)
    return {"router_ms": plain["ms"], "messages": plain["messages"], "with_routes_ms": routed["ms"]}


def measure_batches(small: bool) -> Row:
    """Returns the row of the part "batches"."""
    command = [sys.executable, "-m", "benchmarks.step_batches", f"--tokens={16_000 if small else 1_000_000}"]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    result = json.loads(output.splitlines()[-1])
    names = ("tokens", "bytes", "cpu_s", "memory_over_part", "overhead")
    return {"batch_s_per_mtoken": result["seconds_per_mtoken"], **{name: result[name] for name in names}}


def measure_fleets(small: bool) -> Row:
    """Returns the row of the part "scaling"."""
    load = ScalingLoad((1, 2), 2, 400.0, (20, 40), 10, 2, 1, 0.05, 0.5, 1.0) if small else ScalingLoad()
    return measure_scaling(load)


def measure_killed(small: bool) -> Row:
    """Returns the row of the part "kills"."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_kills(Path(folder) / "runs", *((4, 4) if small else (20, 24)))


PARTS: dict[str, Callable[[bool], Row]] = {
    "scheduler": measure_scheduler,
    "router": measure_messages,
    "routes": lambda small: measure_route_bytes(),
    "batches": measure_batches,
    "scaling": measure_fleets,
    "kills": measure_killed,
}


def summarize(rows: list[Row]) -> Row:
    """Returns the printed object."""
    by_part = {row["part"]: row for row in rows}
    return {name: by_part.get(part, {}).get(name) for part, names in CONTRACT.items() for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated names (default: all of them)")
    parser.add_argument("--rows", type=Path, default=Path("docs/data/fleet.json"), help="file of the measured rows")
    parser.add_argument("--size", choices=SIZES, default="full", help="smoke: everything in small, for a test")
    options = parser.parse_args()
    collect_rarely()  # as every entry point does (launch/flags.py)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts has {unknown[0]!r}; use names of {', '.join(PARTS)}")
    rows = read_rows(options.rows)
    for part in parts:
        if any(row["part"] == part for row in rows):
            continue
        load = os.getloadavg()[0]
        row = {"part": part, **PARTS[part](options.size == "smoke"), "load_before": round(load, 1)}
        print(json.dumps(row), flush=True)
        rows.append(row)
        write_rows(options.rows, rows)
    print(json.dumps(summarize(rows)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of a part end, too
    main()
