"""The instruction of a task, written without a language model from docstrings, signatures, tests and a message."""

import inspect
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_jax.tasks.grader import PYTEST
from composer_jax.tasks.repository.candidate import Candidate
from composer_jax.tasks.repository.entities import Entity, parse_entities
from composer_jax.tasks.repository.source import SourceFile

MAX_TESTS = 8
MAX_ENTITIES = 12
MESSAGE_LINES = 6
MIN_REVEALING = 8  # characters; shorter removed lines may stand in a message by coincidence

REPAIR = "Some tests of this repository fail. Find out why, and repair the code."
WRITE = (
    "A part of this repository is missing. Write it again, so that it does what is described here and what the tests "
    "expect."
)
RULES = "The tests are right as they are: changes to them and to their configuration are not looked at."


@dataclass(frozen=True)
class InstructionStyle:
    """The parts of an instruction.

    docstrings: of removed definitions, below their signatures. tests: the names of failing tests. message: that of
    the first failing test.
    """

    docstrings: bool = True
    tests: bool = True
    message: bool = True


def write_instruction(
    candidate: Candidate,
    sources: Mapping[str, str],
    failures: Mapping[str, str],
    command: Sequence[str],
    style: InstructionStyle | None = None,
) -> str:
    """The instruction for a task.

    sources: the whole repository's Python files. failures: failing test -> its message, in the order of the suite.
    command: runs the suite; empty where the agent cannot run these tests.

    The instruction names neither place nor text of code that was changed in place. Of removed code it gives the
    signature and, by choice, the docstring, which state the behaviour and not the implementation. A message that holds
    a removed line is left out.
    """
    style = style or InstructionStyle()
    parts = [REPAIR]
    missing = missing_entities(candidate, sources)
    if missing:
        described = [describe_entity(entity, style.docstrings) for entity in missing[:MAX_ENTITIES]]
        if len(missing) > MAX_ENTITIES:
            described.append(f"and {len(missing) - MAX_ENTITIES} more")
        parts = [WRITE, "\n\n".join(described)]
    if style.tests:
        names = list(failures)
        listed = [f"- {name}" for name in names[:MAX_TESTS]]
        if len(names) > MAX_TESTS:
            listed.append(f"- and {len(names) - MAX_TESTS} more")
        parts.append("\n".join(["Failing tests:", *listed]))
        if command:
            parts.append(f"They are run by `{format_command(command)} TEST`.")
    if style.message and (message := choose_message(failures, candidate)):
        parts.append("One of them says:\n\n" + "\n".join(f"    {line}" for line in message))
    return "\n\n".join([*parts, RULES]) + "\n"


def missing_entities(candidate: Candidate, sources: Mapping[str, str]) -> list[Entity]:
    """The entities of a candidate whose bodies were removed; an outer one stands for its inner ones."""
    if candidate.kind not in ("stub", "delete_feature", "delete_file"):
        return []
    missing, seen = [], set()
    for path in candidate.files:
        if path not in sources or not path.endswith(".py"):
            continue
        for entity in parse_entities(SourceFile(path, sources[path])):
            outer = any(entity.id.startswith(f"{other}.") for other in seen)
            if entity.id in candidate.entities and entity.id not in seen and not outer and not entity.is_nested:
                missing.append(entity)
                seen.add(entity.id)
    return missing


def describe_entity(entity: Entity, docstring: bool) -> str:
    """The id, the signature and, if wanted, the docstring of an entity."""
    lines = [f"`{entity.id}`", "", f"    {entity.signature}:"]
    if docstring and entity.docstring:
        text = f'"""{inspect.cleandoc(entity.docstring)}"""'
        lines += [f"        {line}".rstrip() for line in text.splitlines()]
    return "\n".join(lines)


def format_command(command: Sequence[str]) -> str:
    """The command without the options that only the report needs."""
    rest = list(command[len(PYTEST) :] if tuple(command[: len(PYTEST)]) == PYTEST else command[3:])
    kept = [f"{word} {shlex.quote(value)}" for word, value in zip(rest, rest[1:], strict=False) if word in ("-o", "-c")]
    return " ".join(["python -m pytest", *(words for words in kept if words != "-c /dev/null")])


def choose_message(failures: Mapping[str, str], candidate: Candidate) -> list[str]:
    """The test and the lines of the first message that holds no removed line; [] where all do."""
    removed = {line.strip() for block in candidate.removed for line in block.splitlines()}
    removed = {line for line in removed if len(line) >= MIN_REVEALING}
    for test, message in failures.items():
        lines = [line.rstrip() for line in message.splitlines() if line.strip()][:MESSAGE_LINES]
        if lines and not any(line in text for text in lines for line in removed):
            return [test, *lines]
    return []
