"""Makes a folder of tasks from a repository: candidates, gates, estimates of difficulty, Harbor directories.

OUT/tasks/ID/          one Harbor directory per task; solution/gates.json holds the verdicts of the gates
OUT/packages/          installed packages, where requirements were given
OUT/baseline.json      the command of the suite and its unreliable tests
OUT/rejected.jsonl     one line per rejected candidate, with the verdicts of the gates
OUT/.building-*/       candidates in the gates; removed when the command ends
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic, TextIO, TypeVar

from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress
from composer_jax.sandbox import LocalSandboxPool, SandboxPool
from composer_jax.seeds import seeded_random
from composer_jax.tasks.grader import SuiteGrader
from composer_jax.tasks.grading import changes_from_texts
from composer_jax.tasks.harbor import read_task, write_task
from composer_jax.tasks.repository.baseline_run import BaselineRun, run_baseline, trace_calls
from composer_jax.tasks.repository.candidate import Candidate, combinations
from composer_jax.tasks.repository.entities import parse_entities
from composer_jax.tasks.repository.gates import Breakage, Gate, break_suite, grade_noop_and_gold
from composer_jax.tasks.repository.instruction import InstructionStyle, write_instruction
from composer_jax.tasks.repository.leaks import ReadableFiles
from composer_jax.tasks.repository.propose import KINDS, propose
from composer_jax.tasks.repository.revert_commit import has_commit, revert_commits
from composer_jax.tasks.repository.source import SourceFile
from composer_jax.tasks.suites.protected import is_protected, protected_files
from composer_jax.tasks.suites.run import SUITE_LIMITS
from composer_jax.tasks.task import Split, Task

Verdict = tuple[Path | None, tuple[Gate, ...]]
S = TypeVar("S")
T = TypeVar("T")

FAMILY = "repository"
ALL_KINDS = (*KINDS, "combine", "revert_commit")
TOOLS = ("repository/*",)
RUNS = 3
MIN_PASSING = 3


def _expand_kind(name: str) -> list[str]:
    kinds = [kind for kind in ALL_KINDS if name in (kind, kind.partition(":")[0])]
    if not kinds:
        raise UserError(f"{name!r} is not a kind of task; use mutate, or some of {', '.join(ALL_KINDS)}")
    return kinds


@dataclass(frozen=True)
class BuildRequest:
    """The arguments of `build`.

    repository: the root of a repository. out: a folder that does not exist or is empty. count: tasks to make.
    kinds: of ALL_KINDS, or "mutate" for all kinds of mutation; None: all, revert_commit only where there is a history.
    seed: of every draw.
    packages: folder of installed packages with pytest. requirements: installed into a new one where `packages` is None.
    jobs: concurrent sandboxes. runs: of the suite before anything is broken. min_passing: tests that must still pass.
    hide_tests: removes the test files with failing tests from the workspace. style: of the instruction.
    split, tools: of the tasks.
    """

    repository: Path
    out: Path
    count: int
    kinds: Sequence[str] | None = None
    seed: int = 0
    packages: Path | None = None
    requirements: tuple[str, ...] = ()
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    runs: int = RUNS
    min_passing: int = MIN_PASSING
    hide_tests: bool = False
    style: InstructionStyle = InstructionStyle()
    split: Split = "train"
    tools: tuple[str, ...] = TOOLS

    def __post_init__(self) -> None:
        if self.kinds is not None:
            object.__setattr__(self, "kinds", tuple(name for kind in self.kinds for name in _expand_kind(kind)))
        if self.out.is_dir() and any(self.out.iterdir()):
            raise UserError(f"{self.out} is not empty; give a new folder")
        if self.count < 1:
            raise UserError(f"{self.count} tasks cannot be made; ask for at least 1")
        if self.packages is None and not self.requirements:
            raise UserError("the tests need pytest: give a folder of installed packages, or what is to be installed")


@dataclass(frozen=True)
class BuildResult:
    """tasks: the written folders, in order. kinds: kind -> tasks. rejected: gate -> candidates that it rejected. tests:
    number of tests that pass in every run. uncollected: test file that cannot be imported -> why."""

    tasks: tuple[Path, ...]
    kinds: Counter[str]
    rejected: Counter[str]
    tests: int
    uncollected: Mapping[str, str]


async def build(request: BuildRequest, pool: SandboxPool | None = None) -> BuildResult:
    """Makes the tasks: the same ones for the same request, repository and Python, whatever the number of jobs.

    Instructions hold output of the tests, and time limits follow the duration of the suite in coarse steps.
    pool: made with SUITE_LIMITS where none is given. Raises UserError when the suite does not run.
    """
    if pool is None:
        async with LocalSandboxPool(SUITE_LIMITS, size=request.jobs) as pool:
            return await build(request, pool)
    request.out.mkdir(parents=True, exist_ok=True)
    packages = request.packages or install(request.requirements, request.out / "packages")
    with tempfile.TemporaryDirectory() as scratch:
        with Progress(request.runs + 1, "runs", "baseline") as progress:
            baseline = await run_baseline(
                request.repository,
                Path(scratch, "pristine"),
                pool,
                packages.resolve(),
                runs=request.runs,
                after_run=lambda report: progress.update(tests=len(report.tests)),
            )
            coverage = await trace_calls(baseline, pool)
            progress.update()
        _write_baseline(baseline, request.out / "baseline.json")
        with tempfile.TemporaryDirectory(prefix=".building-", dir=request.out) as building:
            return await _Builder(request, baseline, coverage, pool, Path(scratch), Path(building)).run()


def install(requirements: Sequence[str], folder: Path) -> Path:
    """Installs requirements into a folder with pip and returns it. Raises UserError with pip's last line."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--target", str(folder), *requirements], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(f"pip could not install {' '.join(requirements)}: {lines[-1].strip()}")
    for script in filter(Path.is_file, (folder / "bin").glob("*")):  # a __pycache__ may lie there, too
        text = script.read_bytes()
        if text.startswith(f"#!{sys.executable}".encode()):  # which a sandbox lacks
            script.write_bytes(b"#!/usr/bin/env python\n" + text.partition(b"\n")[2])
    return folder


class _Builder:
    """Makes the tasks of one request.

    building: an empty folder beside OUT/tasks, from which a finished task is moved in one step.
    """

    def __init__(
        self,
        request: BuildRequest,
        baseline: BaselineRun,
        coverage: dict[str, frozenset[str]],
        pool: SandboxPool,
        scratch: Path,
        building: Path,
    ):
        self.request, self.baseline, self.coverage, self.pool = request, baseline, coverage, pool
        self.scratch, self.building = scratch, building
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.repository.resolve().name)
        self.readable = ReadableFiles([baseline.root, *([baseline.packages] if baseline.packages else [])])
        self.tests = scratch / "tests"
        _copy_files(baseline.root, self.tests, protected_files(baseline.root))
        self.accepted: list[tuple[Candidate, Path]] = []
        self.rejected: Counter[str] = Counter()
        self.seen: set[str] = set()

    async def run(self) -> BuildResult:
        request, streams = self.request, []
        (request.out / "tasks").mkdir()
        with (
            Progress(request.count, "tasks", "generate") as progress,
            open(request.out / "rejected.jsonl", "w", encoding="utf-8") as log,
        ):
            try:
                for stream, most in self.sources():
                    streams.append(stream)
                    await self.accept(stream, most, progress, log)
            finally:
                for stream in streams:
                    await stream.close()
                # Cancelled jobs have ended; the threads that copy their folders may still run.
                await self.pool.trees.settled()
        kinds = Counter(candidate.kind for candidate, _ in self.accepted)
        tasks, baseline = tuple(task for _, task in self.accepted), self.baseline
        return BuildResult(tasks, kinds, self.rejected, len(baseline.tests), baseline.uncollected)

    async def accept(self, stream: OrderedMap[Candidate, Verdict], most: int, progress: Progress, log: TextIO) -> None:
        """Accepts tasks from a stream until there are `most` more, or no more candidates."""
        target = len(self.accepted) + most
        while len(self.accepted) < target and (item := await stream.next()) is not None:
            candidate, (folder, gates) = item
            if candidate.id in self.seen:
                continue
            self.seen.add(candidate.id)
            if folder is None:
                self.rejected[gates[-1].name] += 1
                print(json.dumps(_line(candidate, gates)), file=log, flush=True)
            else:
                task = self.request.out / "tasks" / self.task_id(candidate)
                folder.rename(task)
                self.accepted.append((candidate, task))
            progress.update(int(folder is not None), tried=len(self.seen), rejected=sum(self.rejected.values()))

    def sources(self) -> Iterator[tuple[OrderedMap[Candidate, Verdict], int]]:
        """(stream of candidates, most tasks to accept from it).

        At most a fifth comes from the history; a tenth is left for combinations, which need accepted tasks.
        """
        count, kinds = self.request.count, self.request.kinds
        repository = self.request.repository
        if "revert_commit" in kinds if kinds is not None else (repository / ".git").exists() and has_commit(repository):
            share = count if kinds is not None and set(kinds) == {"revert_commit"} else max(1, count // 5)
            yield self.judge_all(self.reverted_commits()), share
        proposals = self.judge_all(self.proposals([kind for kind in KINDS if kinds is None or kind in kinds]))
        combined = kinds is None or "combine" in kinds
        yield proposals, count - len(self.accepted) - (count // 10 if combined else 0)
        if combined:
            parts = [candidate for candidate, _ in self.accepted]
            rng = seeded_random(FAMILY, self.request.seed, "combine")
            yield self.judge_all(combinations(self.baseline.sources, parts, rng)), count - len(self.accepted)
        yield proposals, count - len(self.accepted)

    def proposals(self, kinds: Sequence[str]) -> Iterator[Candidate]:
        """Mutations, stubs, deleted features and deleted files in turn, until all are exhausted."""
        groups: dict[str, list[str]] = {}
        for kind in kinds:
            groups.setdefault(kind.partition(":")[0], []).append(kind)
        tests = [path for path in protected_files(self.baseline.root) if path.endswith(".py")]
        streams = [
            propose(self.baseline.sources, tests, self.coverage, self.request.seed, group) for group in groups.values()
        ]
        while streams:
            for stream in list(streams):
                proposal = next(stream, None)
                if proposal is None:
                    streams.remove(stream)
                else:
                    yield proposal

    def reverted_commits(self) -> Iterator[Candidate]:
        for candidate in revert_commits(self.request.repository):
            # The working tree may differ from HEAD, which the candidate was made from.
            if all(path in self.baseline.sources or text is not None for path, text in candidate.files.items()):
                yield candidate

    def judge_all(self, candidates: Iterable[Candidate]) -> OrderedMap[Candidate, Verdict]:
        """The candidates with their verdicts, without repeats and without those that change tests."""

        def unique() -> Iterator[Candidate]:
            started = set()
            for candidate in candidates:
                if candidate.id in started or candidate.id in self.seen or any(map(is_protected, candidate.files)):
                    continue
                started.add(candidate.id)
                yield candidate

        return OrderedMap(unique(), self.judge, self.request.jobs)

    async def judge(self, candidate: Candidate) -> Verdict:
        """(the task's folder or None, the verdicts of the gates)."""
        breakage = await break_suite(candidate, self.baseline, self.pool, self.readable, self.request.min_passing)
        if not breakage.passed:
            return None, breakage.gates
        task = self.task(candidate, breakage)
        folder = self.building / task.id
        write_task(task, folder)
        shutil.rmtree(self.scratch / candidate.id)
        gold = changes_from_texts(task.metadata["gold"], self.baseline.root)
        # The task is graded as read back from its directory.
        gates = (*breakage.gates, *await grade_noop_and_gold(read_task(folder), gold, self.pool))
        if not gates[-1].passed:
            shutil.rmtree(folder)
            return None, gates
        (folder / "solution" / "gates.json").write_text(json.dumps([asdict(gate) for gate in gates], indent=1))
        return folder, gates

    def task_id(self, candidate: Candidate) -> str:
        return f"{self.name}-{candidate.kind.replace(':', '-')}-{candidate.id}"

    def task(self, candidate: Candidate, breakage: Breakage) -> Task:
        """The task, on a broken copy of the repository in the scratch folder."""
        baseline, request = self.baseline, self.request
        repository = self.scratch / candidate.id
        shutil.copytree(baseline.root, repository, symlinks=True)
        for path, text in candidate.files.items():
            if text is None:
                (repository / path).unlink()
            else:
                (repository / path).parent.mkdir(parents=True, exist_ok=True)
                (repository / path).write_bytes(text.encode())
        if request.hide_tests:
            for path in {test.partition("::")[0] for test in breakage.failures}:
                (repository / path).unlink()
        difficulty = measure_difficulty(candidate, baseline, len(breakage.failures))
        return Task(
            id=self.task_id(candidate),
            family=FAMILY,
            split=request.split,
            instruction=write_instruction(
                candidate,
                baseline.sources,
                breakage.failures,
                () if request.hide_tests else baseline.command,
                request.style,
            ),
            files={},
            tools=request.tools,
            grader=SuiteGrader(
                tuple(breakage.failures), breakage.pass_to_pass, self.tests, baseline.command, baseline.timeout_s
            ),
            metadata={
                "kind": candidate.kind,
                "candidate": candidate.id,
                "entities": list(candidate.entities),
                "note": candidate.note,
                "removed": list(candidate.removed),
                "seed": request.seed,
                "difficulty": {**asdict(difficulty), "estimate": difficulty.estimate},
                "gold": {path: _text(baseline.root / path) for path in candidate.files},
                "requirements": list(request.requirements),
            },
            repository=repository,
            packages=baseline.packages,
        )


class OrderedMap(Generic[S, T]):
    """Runs work(item) for every item, at most `ahead` at once; next() returns the results in the order of the items.

    A caller that stops and continues later gets the item after its last one: no started work is lost. The results
    depend neither on `ahead` nor on how long any work takes.
    """

    def __init__(self, items: Iterator[S], work: Callable[[S], Awaitable[T]], ahead: int):
        self._items, self._work, self._ahead = items, work, ahead
        self._started: deque[tuple[S, asyncio.Task[T]]] = deque()

    async def next(self) -> tuple[S, T] | None:
        """The next item and its result, or None after the last. Raises the exception of its work."""
        while len(self._started) < self._ahead and (item := next(self._items, None)) is not None:
            self._started.append((item, asyncio.ensure_future(self._work(item))))
        if not self._started:
            return None
        item, job = self._started[0]
        result = await job
        self._started.popleft()
        return item, result

    async def close(self) -> None:
        """Cancels the started work whose results were not taken, and waits until it has ended."""
        jobs = [job for _, job in self._started]
        self._started.clear()
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


# Feature -> (weight, the count at which it contributes two thirds of its weight). The numbers are ours; their order
# follows published results on such tasks: reimplementing is harder than repairing, several places are harder than one.
WEIGHTS = {
    "lines": (0.35, 20.0),
    "files": (0.15, 2.0),
    "entities": (0.15, 3.0),
    "complexity": (0.25, 12.0),
    "fail_to_pass": (0.10, 10.0),
}


@dataclass(frozen=True)
class Difficulty:
    """The counts of a task; `estimate` sorts and samples tasks until a model has been tried on them.

    lines: removed ones, which the solution has to write. files, entities: changed ones. complexity: cyclomatic, summed
    over the entities. fail_to_pass: failing tests.
    """

    lines: int
    files: int
    entities: int
    complexity: int
    fail_to_pass: int

    @property
    def estimate(self) -> float:
        """0 (trivial) to 1: the sum over features of weight * (1 - 3 ** (-count / scale)).

        The first file and the first entity do not count. Each feature saturates, so that no single large number makes
        a task hard; the weights add up to 1.
        """
        counts: Mapping[str, int] = {**asdict(self), "files": self.files - 1, "entities": self.entities - 1}
        return round(
            sum(
                weight * (1 - math.pow(3.0, -max(counts[name], 0) / scale)) for name, (weight, scale) in WEIGHTS.items()
            ),
            4,
        )


def measure_difficulty(candidate: Candidate, baseline: BaselineRun, fail_to_pass: int) -> Difficulty:
    """The counts of a candidate from which its difficulty is estimated."""
    changed = {
        entity.id: entity.complexity
        for path in candidate.files
        if path in baseline.sources and path.endswith(".py")
        for entity in parse_entities(SourceFile(path, baseline.sources[path]))
        if entity.id in candidate.entities
    }
    lines = sum(bool(line.strip()) for block in candidate.removed for line in block.splitlines())
    return Difficulty(max(lines, 1), len(candidate.files), len(candidate.entities), sum(changed.values()), fail_to_pass)


def _line(candidate: Candidate, gates: Sequence[Gate]) -> dict[str, object]:
    return {
        "id": candidate.id,
        "kind": candidate.kind,
        "entities": candidate.entities,
        "note": candidate.note,
        "gates": [asdict(gate) for gate in gates],
    }


def _write_baseline(baseline: BaselineRun, path: Path) -> None:
    record = {
        "command": baseline.command,
        "tests": len(baseline.tests),
        "unreliable": dict(baseline.unreliable),
        "uncollected": dict(baseline.uncollected),
        "import_names": baseline.import_names,
        "excluded": baseline.excluded,
        "timeout_s": baseline.timeout_s,
    }
    path.write_text(json.dumps(record, indent=1))


def _text(path: Path) -> str | None:
    return path.read_bytes().decode() if path.is_file() else None


def _copy_files(root: Path, target: Path, paths: Sequence[str]) -> None:
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, target / path, follow_symlinks=False)
