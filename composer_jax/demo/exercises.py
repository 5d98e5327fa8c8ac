"""Exercises: single steps of bug-fixing conversations, which a small network learns late from whole ones.

A conversation translates a specification into code at most once. A repair exercise is that step alone: a module as a
tool shows it, and the edit that repairs it. Pretraining mixes them with source code, SFT with conversations. A note
exercise is the step from somebody's note to the module that it names. Without these, one SFT run of four ended before
the network had learned where that name stands, and its policy solved no task with notes.
"""

import re
from typing import Any

import numpy as np

from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.token_source import SourceInputs, TraceSource
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.demo import bugfix, notes
from composer_jax.demo.bugfix_expert import repair
from composer_jax.demo.tokenizer import require_own_tokenizer
from composer_jax.seeds import hash_seed
from composer_jax.stages.trace_sources import SourceContext
from composer_jax.tasks.task import Task

_STATEMENTS = re.compile(r"(return .*)")


def pretraining_exercises(inputs: SourceInputs, *, count: int) -> TraceSource:
    """Returns `count` exercises as a source of pretraining rows (data/sources.py).

    Their stream of tasks belongs to pretraining, so no later stage repeats one of them.
    """
    seed = hash_seed("pretrain", inputs.seed)
    return TraceSource(repair_exercises(seed, count, require_own_tokenizer(inputs.tokenizer), train_module=True))


def repair_exercises(
    seed: int, count: int, tok: Tokenizer, *, train_module: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the exercises of the training tasks number 0..count-1 of stream `seed`."""
    tasks = (bugfix.generate("train", seed, index, bugs=1) for index in range(count))
    return [repair_exercise(task, tok, train_module) for task in tasks]


def repair_exercise(task: Task, tok: Tokenizer, train_module: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens int32[n], trained bool[n]) of a bug-fixing task.

    Not trained, in the form of tool answers: the place of the function, and its module. Trained: the edit; with
    `train_module` also the return statement of every intact function, whose specification is the line before it.
    """
    chat = CompactFormat(tok)
    know = task.metadata["bugs"][0]
    turn = repair(know)
    text = task.files[know["path"]]
    number, head = next((n, line) for n, line in enumerate(text.split("\n"), 1) if f"def {know['function']}(" in line)
    parts = [
        (chat.message("tool", [f"{know['path']}:{number} {head}"]), False),
        ([tok.tool], False),
        # White space between lines and the word "return" are tokens of their own, so a module that is cut there has the
        # same tokens as in one piece.
        *(
            (tok.encode(part), train_module and part.startswith("return ") and part != know["old"])
            for part in _STATEMENTS.split(text)
        ),
        ([tok.end, tok.assistant], False),
        (chat.render_assistant(turn.thought, [turn.call]), True),
    ]
    tokens = np.concatenate([np.array(ids, np.int32) for ids, _ in parts])
    return tokens, np.repeat([trained for _, trained in parts], [len(ids) for ids, _ in parts])


def note_exercise(task: Task, person: str, tok: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens int32[n], trained bool[n]) of a task with notes on one bug.

    Not trained: the call that reads a person's note, and the note. Trained: the call that reads its module.
    """
    chat = CompactFormat(tok)
    (bug,) = task.metadata["bugs"]
    path = notes.note_path(person, bug["function"])
    before = [
        tok.assistant,
        *chat.render_assistant("", [ToolCall("read", {"path": path})]),
        *chat.message("tool", [task.files[path]]),
        tok.assistant,
    ]
    step = chat.render_assistant("", [ToolCall("read", {"path": bug["path"]})])
    return np.array([*before, *step], np.int32), np.repeat([False, True], [len(before), len(step)])


class RepairExercises:
    """The SFT source of repair exercises. count: how many."""

    def __init__(self, context: SourceContext, count: int):
        self.context, self.count = context, count

    def traces(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (tokens int32 [n], trained bool [n]) of every exercise; only the edit is trained."""
        seed = hash_seed("sft exercises", self.context.seed)
        return repair_exercises(seed, self.count, require_own_tokenizer(self.context.tokenizer), train_module=False)

    def report(self) -> dict[str, Any]:
        """Returns nothing: exercises have no results."""
        return {}


class NoteExercises(RepairExercises):
    """The SFT source of note exercises. count: how many."""

    def traces(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (tokens int32 [n], trained bool [n]) of every exercise; only the last call is trained."""
        seed, tok = hash_seed("sft note exercises", self.context.seed), require_own_tokenizer(self.context.tokenizer)
        tasks = (notes.generate(notes.OneBug.FAMILY, 1, "train", seed, i, reliable=None) for i in range(self.count))
        return [note_exercise(task, notes.PEOPLE[i % len(notes.PEOPLE)], tok) for i, task in enumerate(tasks)]
