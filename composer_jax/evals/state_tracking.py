"""State tracking: a model reads the first version of a file and its changes, and writes the last version.

After Composer 2 (arXiv 2603.24477, appendix B), which names LoCoDiff; the form of the prompt is ours.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.corpus import split_position
from composer_jax.data.prepare.filters import filter_text, reason_by_path
from composer_jax.data.prepare.git_repository import BlobReader, file_histories, head_commit, is_repository
from composer_jax.data.prepare.languages import Language, language_of
from composer_jax.data.prepare.layout import printable_path, with_line_end
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.errors import UserError
from composer_jax.evals.interval import interval
from composer_jax.event_loop import run_all
from composer_jax.sampler.policy import Sample, ServingPolicy
from composer_jax.tasks.patches import format_unified

TOO_LONG = "too long"
"""Why a task is skipped whose prompt and answer exceed the context."""
_BACKTICKS = re.compile("`+")


@dataclass(frozen=True)
class StateTask:
    """The history of one file. The prompt ends where the model is to write `last`, and then `fence`."""

    path: str
    first: str
    last: str
    prompt: str
    fence: str

    def read_answer(self, written: str) -> str:
        """Returns the file in what the model wrote: all before the fence, or everything without one."""
        body, fence, _ = f"\n{written}".partition(f"\n{self.fence}")
        return body[1:] + "\n" if fence and body else body[1:]


@dataclass(frozen=True)
class EncodedTask:
    """A task as token ids."""

    task: StateTask
    prompt: list[int]
    max_tokens: int
    """Tokens that may be sampled: those of the last version and a quarter more."""


@dataclass(frozen=True)
class StateResult:
    """What was written for one task. Distances are Levenshtein's: inserted, deleted and replaced characters."""

    path: str
    prompt_tokens: int
    sampled_tokens: int
    finish_reason: str
    distance: int
    """From what the model wrote to the last version."""
    normalised: float
    """The same, divided by the characters of the longer text: from 0 to 1."""
    copy_distance: int
    """From the first version to the last one: the control that copies the file and reads no change."""
    copy_normalised: float
    written: str


def make_task(path: str, versions: Sequence[str]) -> StateTask:
    """Returns the task of at least two versions of a file, the oldest first; each ends with a line end."""
    longest = max((len(run) for version in versions for run in _BACKTICKS.findall(version)), default=0)
    fence = "`" * max(3, longest + 1)  # as in CommonMark: no line of a version closes the block
    parts = [f"The first version of {path}:\n\n{fence}\n{versions[0]}{fence}\n\n"]
    count = len(versions) - 1
    for number, (before, after) in enumerate(pairwise(versions), 1):
        diff = format_unified(path, before, after)
        parts.append(f"Change {number} of {count}:\n\n{fence}diff\n{diff}{fence}\n\n")
    parts.append(f"{path} after all changes:\n\n{fence}\n")
    return StateTask(path, versions[0], versions[-1], "".join(parts), fence)


def read_tasks(repository: Path, diffs: int) -> Iterator[StateTask | str]:
    """Yields a task, or the reason why there is none, for each file with at least `diffs` changes.

    The tasks have the newest changes of files that are checked out, of a language that `launch.prepare_data` reads, in
    an order that the paths fix. Changes of nothing but line ends are not counted. Raises UserError for a folder that is
    not a git repository, or that has no file of so many changes.
    """
    if not is_repository(repository):
        raise UserError(f"{repository} is not a git repository; name the folder that holds .git")
    histories = file_histories(repository, head_commit(repository))
    changes = {
        path: len(ids) - 1 for path, ids in histories.items() if reason_by_path(path, language_of(path), ()) is None
    }
    chosen = sorted((path for path, count in changes.items() if count >= diffs), key=split_position)
    if not chosen:
        raise UserError(
            f"no source file of {repository} has {diffs} changes, the most is {max(changes.values(), default=0)}; use "
            "fewer, or another repository (a shallow clone has no history)"
        )
    with BlobReader(repository) as reader:
        for path in chosen:
            language = language_of(path)
            assert language is not None
            versions = _newest_versions(reader, path, histories[path], diffs + 1, language)
            yield versions if isinstance(versions, str) else make_task(printable_path(path), versions)


def _newest_versions(
    reader: BlobReader, path: str, ids: Sequence[str], count: int, language: Language
) -> list[str] | str:
    """Returns the last `count` versions, of which none equals the next, or why there are none."""
    versions: list[str] = []
    for object_id in reversed(ids):
        try:
            text, reason = filter_text(reader.read(object_id), language, path)
        except OSError:
            return "unreadable"
        if reason is not None:
            return reason
        text = with_line_end(text)
        if not versions or versions[-1] != text:
            versions.append(text)
        if len(versions) == count:
            return versions[::-1]
    return "too few changes"


def encode_tasks(
    tasks: Iterable[StateTask | str], tok: TextTokenizer, count: int, max_context: int
) -> tuple[list[EncodedTask], dict[str, int]]:
    """Returns the first `count` tasks that fit into `max_context` tokens, and how many others were skipped, by reason.

    Raises UserError if none fits.
    """
    encoded: list[EncodedTask] = []
    skipped: Counter[str] = Counter()
    for task in tasks:
        if isinstance(task, str):
            skipped[task] += 1
            continue
        prompt = [*([] if tok.bos is None else [tok.bos]), *tok.encode_document(task.prompt)]
        answer = len(tok.encode(task.last + task.fence))
        max_tokens = answer + answer // 4 + 1
        if len(prompt) + max_tokens > max_context:
            skipped[TOO_LONG] += 1
            continue
        encoded.append(EncodedTask(task, prompt, max_tokens))
        if len(encoded) == count:
            break
    if not encoded:
        reasons = ", ".join(f"{number} {reason}" for reason, number in skipped.items())
        raise UserError(
            f"no file makes a task that fits into {max_context} tokens ({reasons}); use fewer changes per task, or a "
            "model with a longer context"
        )
    return encoded, dict(skipped)


async def run_tasks(
    tasks: Sequence[EncodedTask],
    policy: ServingPolicy,
    decode: Callable[[Sequence[int]], str],
    on_done: Callable[[], object] = lambda: None,
) -> list[StateResult]:
    """Lets a policy write the files greedily, as many at once as it has room for; returns the results in order.

    Args:
      decode: text of sampled ids, without end tokens.
      on_done: called after each task.
    """

    async def write(encoded: EncodedTask) -> StateResult:
        stop = (f"\n{encoded.task.fence}",)
        session = await policy.open(0)  # greedy: no choice is random
        try:
            params = SamplingParams(encoded.max_tokens, temperature=0.0, stop_strings=stop)
            sample = await session.sample(encoded.prompt, params)
        finally:
            session.close()
        on_done()
        return _result(encoded, sample, decode)

    async with policy.serving():
        return await run_all(write(task) for task in tasks)


def _result(encoded: EncodedTask, sample: Sample, decode: Callable[[Sequence[int]], str]) -> StateResult:
    task = encoded.task
    written = task.read_answer(decode(sample.tokens))
    distance, copy_distance = edit_distance(written, task.last), edit_distance(task.first, task.last)
    return StateResult(
        path=task.path,
        prompt_tokens=len(encoded.prompt),
        sampled_tokens=len(sample.tokens),
        finish_reason=sample.finish_reason,
        distance=distance,
        normalised=distance / max(len(written), len(task.last)),
        copy_distance=copy_distance,
        copy_normalised=copy_distance / max(len(task.first), len(task.last)),
        written=written,
    )


def edit_distance(a: str, b: str) -> int:
    """Returns Levenshtein's distance in characters. Raises UserError without the package rapidfuzz."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise UserError("edit distances need rapidfuzz; pip install 'composer_jax[evals]'.") from None
    return Levenshtein.distance(a, b)


def summarise(results: Sequence[StateResult]) -> dict[str, Any]:
    """Returns means over the tasks, with a 95 % interval of the normalised distance (evals/interval.py)."""

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    low, high = interval([result.normalised for result in results])
    return {
        "tasks": len(results),
        "exact": mean(result.distance == 0 for result in results),
        "normalised_distance": mean(result.normalised for result in results),
        "low": low,
        "high": high,
        "distance": mean(result.distance for result in results),
        "copy_normalised_distance": mean(result.copy_normalised for result in results),
        "copy_distance": mean(result.copy_distance for result in results),
        "better_than_copy": mean(result.distance < result.copy_distance for result in results),
        "cut": mean(result.finish_reason == "length" for result in results),
        "prompt_tokens": mean(result.prompt_tokens for result in results),
    }
