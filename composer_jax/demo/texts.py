"""Texts of the demo's tasks for the tokenizer: files, tool calls and reports as an agent sees them."""

from collections.abc import Iterator

from composer_jax.data.chat import compact_json
from composer_jax.demo import recall
from composer_jax.demo.generate import FAMILIES, generate
from composer_jax.demo.recall_expert import Notes, RecallRates, recall_summary
from composer_jax.seeds import seeded_random


def task_texts(seed: int, count: int) -> Iterator[str]:
    """Yields the texts of `count` training tasks of each family.

    Their indices are negative, so no stage trains on these tasks.
    """
    for index in range(count):
        for family in FAMILIES:
            task = generate(family, "train", seed, -1 - index)
            yield task.instruction
            for path, text in task.files.items():
                if path.endswith(".py") and path != "run_tests.py":
                    yield text
                    line = text.rstrip().rsplit("\n", 1)[-1]
                    yield "read" + compact_json({"path": path})
                    yield "edit" + compact_json({"path": path, "old": line, "new": line})
            if family == recall.FAMILY:
                notes = Notes(task.metadata["facts"], read_conf=True, read_target=index % 2 == 0)
                yield recall_summary(task, notes, "long", RecallRates(), seeded_random("tokenizer", index))
