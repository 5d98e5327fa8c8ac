"""Generates and validates tasks of real repositories: `python -m benchmarks.tasks [PACKAGE==VERSION ...]`.

Downloads source distributions with pip, by default of three small packages that include their suites, makes tasks of
each, and grades every task several times untouched, which must score 0, and solved, which must score 1. Prints progress
on stderr and, as the last line of stdout, one JSON object with, for each package:
    tests, unreliable   tests of its suite: used, and left out because they did not pass every time
    tasks, families     tasks made, and the number of generator families they come from: mutate, stub, delete_feature,
                        delete_file, combine, and revert_commit (needs a history, which source distributions lack)
    kinds               number of kinds: as families, with each kind of mutation counted by itself
    of                  tasks of each kind
    rejected            rejected candidates by gate
    gold, nothing       how many of all gradings scored 1 and 0, as "120 of 120"
    generate_s, validate_s   wall time in seconds
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.tasks.harbor import read_task
from composer_jax.tasks.repository.build import BuildRequest, build, install
from composer_jax.tasks.suites.run import SUITE_LIMITS
from composer_jax.tasks.validate import validate

PACKAGES = ("toolz==1.0.0", "cachetools==5.5.2", "itsdangerous==2.2.0")
REQUIREMENTS = ("pytest==9.2.0", "freezegun==1.5.5")


def fetch(requirement: str, folder: Path) -> Path:
    """Downloads and unpacks the source distribution of `name==version`. Raises UserError when pip cannot get it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-binary", ":all:", "--no-deps", "--dest", str(folder), requirement]
    process = subprocess.run(command, capture_output=True, text=True)
    archives = sorted(folder.glob(f"{requirement.partition('==')[0]}*.tar.gz"))
    if process.returncode or not archives:
        lines = process.stderr.strip().splitlines() or ["pip printed nothing"]
        raise UserError(f"pip could not fetch the source of {requirement}: {lines[-1]}")
    with tarfile.open(archives[0]) as archive:
        # PEP 706: Python 3.11 before 3.11.4 has no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(folder)
    return folder / archives[0].name.removesuffix(".tar.gz")


async def measure(repository: Path, packages: Path, out: Path, count: int, runs: int) -> dict[str, object]:
    """Returns the measurements of one package."""
    jobs = len(os.sched_getaffinity(0))
    async with LocalSandboxPool(SUITE_LIMITS, size=jobs) as pool:
        started = time.monotonic()
        built = await build(BuildRequest(repository, out, count, packages=packages, jobs=jobs), pool)
        generated = time.monotonic()
        tasks = [read_task(folder) for folder in built.tasks]
        with Progress(len(tasks), "tasks", "validate") as progress:
            validations = await validate(
                tasks, pool, runs, jobs, after_task=lambda one: progress.update(last=one.verdict)
            )
    baseline = json.loads((out / "baseline.json").read_text())
    gold = [reward for one in validations for reward in one.gold]
    nothing = [reward for one in validations for reward in one.nothing]
    return {
        "tests": baseline["tests"],
        "unreliable": len(baseline["unreliable"]),
        "tasks": len(tasks),
        "families": len({kind.partition(":")[0] for kind in built.kinds}),
        "kinds": len(built.kinds),
        "of": dict(sorted(built.kinds.items())),
        "rejected": dict(built.rejected),
        "gold": f"{gold.count(1.0)} of {len(gold)}",
        "nothing": f"{nothing.count(0.0)} of {len(nothing)}",
        "generate_s": round(generated - started, 1),
        "validate_s": round(time.monotonic() - generated, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE==VERSION", default=PACKAGES)
    parser.add_argument("--count", type=int, default=24, help="tasks per package")
    parser.add_argument("--runs", type=int, default=5, help="gradings of each task, untouched and solved")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        packages = install(REQUIREMENTS, Path(scratch, "packages"))
        for requirement in arguments.packages:
            print(requirement, file=sys.stderr, flush=True)
            repository = fetch(requirement, Path(scratch))
            out = Path(scratch, "out", requirement)
            results[requirement] = asyncio.run(measure(repository, packages, out, arguments.count, arguments.runs))
            print(f"  {results[requirement]}", file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
