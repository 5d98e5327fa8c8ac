"""Texts of the demo's tasks for the tokenizer: files, tool calls and summaries as an agent sees and writes them."""

from collections.abc import Iterator

from composer_jax.data.chat.messages import compact_json
from composer_jax.demo import bugfix, memory_chain, notes
from composer_jax.demo.memory_chain import VALUES, next_line, quoted
from composer_jax.demo.prompts import REQUESTS


def task_texts(seed: int, count: int) -> Iterator[str]:
    """Yields the texts of `count` bug-fixing tasks, and of half as many memory chains and notes.

    Their indices are negative, so no stage trains on these tasks.
    """
    for index in range(count):
        task = bugfix.generate("train", seed, -1 - index)
        yield task.instruction
        yield f"FAIL {task.metadata['bugs'][0]['function']}(2) is 3, want 4"
        for path, text in task.files.items():
            if path.endswith(".py") and path != "run_tests.py":
                yield text
                line = text.rstrip().rsplit("\n", 1)[-1]
                yield "read" + compact_json({"path": path})
                yield "edit" + compact_json({"path": path, "old": line, "new": line})
    for index in range(count // 2):
        task = notes.OneBug().generate("train", seed, -1 - index)
        for path in (notes.note_path(person, task.metadata["bugs"][0]["function"]) for person in notes.PEOPLE):
            yield task.files[path]
            yield "read" + compact_json({"path": path})
    yield from chain_texts(seed, count // 2)


def chain_texts(seed: int, count: int) -> Iterator[str]:
    """Yields the texts of `count` chains for the tokenizer, as an agent sees and writes them.

    Their indices are negative, so no stage trains on these chains.
    """
    for index in range(count):
        task = memory_chain.generate("train", seed, -1 - index, asked=None)
        lines = list(task.metadata["items"])
        carried = f"{lines[0]}\n{next_line(task.metadata['paths'][1])}"
        yield from (task.instruction, REQUESTS["short"], f"Summary 1:\n{carried}")
        for path, text in task.files.items():
            yield text
            yield "read" + compact_json({"path": path})
        value = VALUES[index % len(VALUES)]
        edit = {"path": path, "old": task.metadata["name"], "new": quoted(value)}
        yield "edit" + compact_json(edit) + "finish{}"
