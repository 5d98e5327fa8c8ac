"""Memory chain: what step 1 shows is needed at the end of a long chain, and three summaries lie in between.

Every file of a chain has one item and the name of the next file; the last file asks for one of the items. A summary on
the way has fewer tokens than two items take, so the agent has to choose an item before the last file asks for one.
Nothing in the workspace or in the instruction says that it is always that of the first file: only the reward at the
end does.

A chain that is carried through without the item passes with probability 1/8: the agent then guesses one of eight
values, which are drawn independently of each other, so that no other item says anything about the one asked for.
"""

from composer_jax.agent.summary import FACTS
from composer_jax.demo.splits import draw_names, file_stems
from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Split, Task

FAMILY = "memory_chain"
TOOLS = ("read", "edit", "finish")
STEPS = 8
"""Messages of the agent in a whole chain: one read for each file, and the answer."""
VALUES = ("amber", "coral", "ivory", "jade", "olive", "pearl", "ruby", "teal")
CHANCE = 1 / len(VALUES)
"""Pass rate of an agent that answers with one of the values at random."""
FUNCTION = "answer"
ASKED = 1
"""Number of the file whose item the last file asks for."""


def item_line(number: int, value: str) -> str:
    """Returns an item as it is written in its file, in a summary and in the thought before the answer."""
    return f"{item_name(number)} = {value}"


def item_name(number: int) -> str:
    """Returns what stands for the item of a file in the last file."""
    return f"item_{number}"


def next_line(file: str) -> str:
    """Returns the line that names the next file, in a file and in a summary."""
    return f"next = {file}"


def generate(split: Split, seed: int, index: int, *, steps: int = STEPS, asked: int | None = ASKED) -> Task:
    """Returns task number `index` of a stream: a pure function of its arguments, which takes under a millisecond.

    Names of files are those of the split (splits.py), so that no held-out pair of a file and its value is one that
    training had.

    Args:
      steps: messages of the agent; the chain has `steps - 2` files with an item, and the file that asks.
      asked: number of the file, from 1, whose item is asked for; None draws it.

    Raises:
      UserError: steps below 3, or an item that the chain does not have.
    """
    items = steps - 2
    if items < 1:
        raise UserError(f"a chain of {steps} steps has no items; use at least 3.")
    if asked is not None and not 1 <= asked <= items:
        raise UserError(f"a chain of {steps} steps has the items 1 to {items}, not item {asked}.")
    target = "any" if asked is None else str(asked)
    rng = seeded_random(FAMILY, split, seed, index, steps, target)
    stems = draw_names(rng, file_stems(split), items + 1)
    paths = [*stems[:-1], f"{stems[-1]}.py"]
    values = {number: rng.choice(VALUES) for number in range(1, items + 1)}
    number = rng.randint(1, items) if asked is None else asked
    name, value = item_name(number), values[number]
    files = {
        path: f"{item_line(at, values[at])}\n{next_line(paths[at])}\n" for at, path in enumerate(paths[:-1], start=1)
    }
    return Task(
        id=f"{FAMILY}-{split}-{seed}-{index}-{steps}-{target}",
        family=FAMILY,
        split=split,
        instruction=f"Read {paths[0]}, then the next.",
        files={**files, paths[-1]: f"def {FUNCTION}(): return {name}\n"},
        tools=TOOLS,
        # No message is left to read a file a second time after the last one has asked for its item.
        max_turns=steps,
        grader=CaseGrader((Case(stems[-1], FUNCTION, (), value),)),
        metadata={
            "kind": FAMILY,
            "paths": paths,
            "items": {item_line(at, v): v for at, v in values.items()},
            "name": name,
            FACTS: [item_line(number, value)],
        },
    )


def quoted(value: str) -> str:
    """Returns the text that replaces the name of the item in the last file."""
    return f"'{value}'"


class MemoryChain:
    """The family of memory chains (tasks/family.py: TaskFamily)."""

    STEPS = STEPS

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed)."""
        return generate(split, seed, index, steps=self.STEPS)


class ShortMemoryChain(MemoryChain):
    """The same with 7 steps, in which two summaries lie between the first item and the question.

    With three, an SFT policy that happens to keep other items brings the first one to the end so rarely that RL may see
    no episode that does.
    """

    STEPS = 7
