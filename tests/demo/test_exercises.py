"""Exercises: the decisive turn of a real conversation, right, and of training tasks only."""

import pytest

from composer_jax.data.chat.compact import CompactFormat
from composer_jax.demo import bugfix
from composer_jax.demo.exercises import repair_exercise
from tests.to_text import to_text


@pytest.mark.parametrize("index", range(6))
def test_an_exercise_shows_a_module_and_trains_its_repair(tok, index):
    task = bugfix.generate("train", 3, index, bugs=1)
    (bug,) = task.metadata["bugs"]
    tokens, trained = repair_exercise(task, tok, train_module=True)
    path = bug["path"]
    assert tokens.dtype == "int32" and trained.dtype == bool and len(tokens) == len(trained)

    start = tokens.tolist().index(tok.assistant) + 1
    context, answer = tokens[:start].tolist(), tokens[start:].tolist()
    assert trained[start:].all() and answer[-1] == tok.end
    place, module, rest = to_text(tok, context).split("<|end|>\n")
    number = int(place.removeprefix(f"<|tool|>{path}:").split()[0])
    assert f"def {bug['function']}(" in task.files[path].split("\n")[number - 1]
    assert (module, rest) == (f"<|tool|>{task.files[path]}", "<|assistant|>")
    # The module in ids is what the policy will see, and what its other functions return is right.
    shown = CompactFormat(tok).message("tool", [task.files[path]])
    assert context[-len(shown) - 1 : -1] == shown
    right = [line.strip() for line in task.files[path].split("\n") if "return " in line]
    right.remove(bug["old"])
    assert tok.decode(tokens[:start][trained[:start]].tolist()) == "".join(right)

    same, edit_only = repair_exercise(task, tok, train_module=False)
    assert same.tolist() == tokens.tolist() and not edit_only[:start].any() and edit_only[start:].all()

    [call] = CompactFormat(tok).parse(answer).calls
    repaired = task.files[path].replace(call.arguments["old"], call.arguments["new"])
    spaces: dict = {}
    exec(repaired, spaces)  # our own generator's code
    cases = [c for c in task.grader.cases if f"{c.module}.py" == path]
    assert cases and all(spaces[c.function](*c.args) == c.want for c in cases)
