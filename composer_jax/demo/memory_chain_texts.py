"""Texts of memory chains for the tokenizer."""

from collections.abc import Iterator

from composer_jax.demo import memory_chain
from composer_jax.demo.memory_chain import VALUES, next_line, quoted
from composer_jax.demo.prompts import REQUESTS


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
            yield f'read{{"path":"{path}"}}'
        value = VALUES[index % len(VALUES)]
        yield f'edit{{"path":"{path}","old":"{task.metadata["name"]}","new":"{quoted(value)}"}}finish{{}}'
