"""Lookups: files that do not depend on each other, which an agent reads one by one or side by side in one message.

The instruction names some files, each of which has a value, and the answer lists the names with their values. Whatever
the messages in which the files are read, the answer is the same. Only a price of messages says which is better, so the
calls per message show what the length cost teaches (`python -m benchmarks.parallel_calls`).
"""

from collections.abc import Iterator

from composer_jax.demo.memory_chain import TOOLS, VALUES, quoted
from composer_jax.demo.splits import draw_names, file_stems
from composer_jax.seeds import seeded_random
from composer_jax.tasks.family import TaskFamily
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Split, Task

ANSWER = "answer"
"""Name of the module, and of the function in it, that returns the answer."""
ANSWER_FILE = f"{ANSWER}.py"
UNKNOWN = "unknown"
"""What stands in that module where the answer belongs."""


def generate(family: str, files: int, split: Split, seed: int, index: int) -> Task:
    """Returns task number `index` of a stream: a pure function of its arguments, which takes under a millisecond.

    Names of files are those of the split (splits.py).

    Args:
      files: how many files the instruction names.
    """
    rng = seeded_random("lookups", files, split, seed, index)
    paths = draw_names(rng, file_stems(split), files)
    lines = {path: f"{path} {rng.choice(VALUES)}" for path in paths}
    answer = " ".join(lines.values())
    return Task(
        id=f"{family}-{split}-{seed}-{index}",
        family=family,
        split=split,
        instruction=f"Read {' '.join(paths)}.",
        files={
            **{path: f"{line}\n" for path, line in lines.items()},
            ANSWER_FILE: f"def {ANSWER}(): return {UNKNOWN}\n",
        },
        tools=TOOLS,
        max_turns=files + 2,  # one more than one file for each message and the answer take
        grader=CaseGrader((Case(ANSWER, ANSWER, (), answer),)),
        metadata={"paths": paths, "answer": answer},
    )


class FewLookups:
    """The family of tasks with two files (tasks/family.py: TaskFamily)."""

    FAMILY, FILES = "few_lookups", 2

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed)."""
        return generate(self.FAMILY, self.FILES, split, seed, index)


class ManyLookups(FewLookups):
    """The family of tasks with four files."""

    FAMILY, FILES = "many_lookups", 4


LOOKUPS: dict[str, TaskFamily] = {family.FAMILY: family() for family in (FewLookups, ManyLookups)}
"""Name -> family."""


def lookup_texts(seed: int, count: int) -> Iterator[str]:
    """Yields the texts of `count` tasks for the tokenizer, as an agent sees and writes them.

    Their indices are negative, so no stage trains on these tasks.
    """
    for index in range(count):
        task = ManyLookups().generate("train", seed, -1 - index)
        yield task.instruction
        yield from task.files.values()
        yield "".join(f'read{{"path":"{path}"}}' for path in task.metadata["paths"])
        yield f'edit{{"path":"{ANSWER_FILE}","old":"{UNKNOWN}","new":"{quoted(task.metadata["answer"])}"}}finish{{}}'
