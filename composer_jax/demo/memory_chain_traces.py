"""Traces of the memory chain's expert for SFT, and texts for the tokenizer."""

from collections.abc import Iterator, Mapping

from composer_jax.demo import memory_chain
from composer_jax.demo.expert_traces import ExpertTraces
from composer_jax.demo.memory_chain import FAMILY, VALUES, next_line, quoted
from composer_jax.demo.prompts import REQUESTS
from composer_jax.stages.trace_sources import SourceContext
from composer_jax.tasks.task import Task


class MemoryChainTraces(ExpertTraces):
    """The SFT source of memory chains: whole ones, which are summarized, and short ones, which are not.

    traces: number of traces of each of `KINDS`.
    """

    KINDS = {"memory_chain": (FAMILY, "short"), "memory_chain_uncompacted": (FAMILY, "none")}
    SHORT_STEPS = 5
    """Steps of the chains without a summary. Their end asks for what the context shows, which teaches to look it up; in
    a whole chain five items of six are forgotten by then."""

    def __init__(self, context: SourceContext, traces: Mapping[str, int]):
        super().__init__(context, traces)

    def generate(self, kind: str, seed: int, index: int) -> Task:
        """See ExpertTraces.generate; the end asks for any item."""
        steps = memory_chain.STEPS if kind == FAMILY else self.SHORT_STEPS
        return memory_chain.generate("train", seed, index, steps=steps, asked=None)


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
