"""Random histories of one file in which every line has an identity, so that what became of it is known.

A line is a pair (identity, words). People and formatters insert, delete, change, move, restore and lay out lines; a
changed line is a new one. The truth is read off the identities, and never off the text.
"""

from __future__ import annotations

import dataclasses
import random

Line = tuple[int, tuple[str, ...]]
COMMON = (("else:",), ("return", "None"), ("pass",), ("continue",), ("}",), ("",), ("try:",))


@dataclasses.dataclass
class History:
    """A file before the agent, after it, and later. With `duplicates`, some lines are equal to others."""

    random: random.Random
    duplicates: bool
    before: list[Line] = dataclasses.field(default_factory=list)
    after: list[Line] = dataclasses.field(default_factory=list)
    later: list[Line] = dataclasses.field(default_factory=list)
    identities: int = 0

    def new_line(self) -> Line:
        self.identities += 1
        if self.duplicates and self.random.random() < 0.3:
            return self.identities, self.random.choice(COMMON)
        names = [f"name_{self.random.randrange(10**6)}" for _ in range(self.random.randint(2, 6))]
        return self.identities, (f"result_{self.identities}", *names)

    def insert(self, lines: list[Line]) -> None:
        where = self.random.randint(0, len(lines))
        lines[where:where] = [self.new_line() for _ in range(self.random.randint(1, 6))]

    def delete(self, lines: list[Line]) -> None:
        where = self.random.randint(0, len(lines))
        del lines[where : where + self.random.randint(1, 6)]

    def change(self, lines: list[Line]) -> None:
        where = self.random.randint(0, len(lines))
        for index in range(where, min(len(lines), where + self.random.randint(1, 3))):
            words = list(lines[index][1])
            words[self.random.randrange(len(words))] = f"changed_{self.identities}"
            self.identities += 1
            lines[index] = (self.identities, tuple(words))

    def move(self, lines: list[Line]) -> None:
        where = self.random.randint(0, len(lines))
        block = lines[where : where + self.random.randint(3, 8)]
        del lines[where : where + len(block)]
        target = self.random.randint(0, len(lines))
        lines[target:target] = block

    def restore(self, lines: list[Line]) -> None:
        """Restores the file as it was before the agent, and perhaps what the agent made of it."""
        lines[:] = self.before if self.random.random() < 0.7 else self.after

    def restore_deleted(self, lines: list[Line]) -> None:
        """Puts a line that the agent deleted back behind the line that it followed."""
        present = {identity for identity, _ in lines}
        for index, line in enumerate(self.before):
            previous = self.before[index - 1][0] if index else None
            where = [place for place, (identity, _) in enumerate(lines) if identity == previous]
            if line[0] not in present and (where or not index):
                lines.insert(where[0] + 1 if where else 0, line)
                return

    def play(self) -> None:
        self.before = [self.new_line() for _ in range(self.random.randint(0, 50))]
        self.after = list(self.before)
        for _ in range(self.random.randint(1, 4)):
            self.random.choice([self.insert, self.insert, self.delete, self.change])(self.after)
        self.later = list(self.after)
        edits = [self.insert, self.delete, self.change, self.move, self.restore_deleted]
        for _ in range(self.random.randint(0, 5)):
            self.random.choice(edits)(self.later)
        if self.random.random() < 0.1:
            self.restore(self.later)

    def truth(self) -> tuple[int, int, int, int]:
        """(added, added and still there, deleted, deleted and still absent), of lines with a letter or digit."""
        before, after, later = ({identity for identity, _ in lines} for lines in (self.before, self.after, self.later))
        countable = {i for i, words in (*self.before, *self.after) if words not in (("}",), ("",))}
        added, deleted = (after - before) & countable, (before - after) & countable
        return len(added), len(added & later), len(deleted), len(deleted - later)


def flat(lines: list[Line]) -> str:
    """The text with each line as one."""
    return "".join(f"    {_statement(words, ', ')}\n" for _, words in lines)


def formatted(lines: list[Line], chance: random.Random) -> str:
    """The text as a formatter might lay it out: other indents, quotes, line ends, and calls over several lines."""
    indent = chance.choice(["", "  ", "\t"])
    end = chance.choice(["\n", "\r\n"])
    text = []
    for _, words in lines:
        statement = _statement(words, ", ")
        if chance.random() < 0.3:
            statement = _statement(words, f",{end}{indent * 2}").replace("(", f"({end}{indent}", 1)
            statement = statement[:-1] + f",{end})" if statement.endswith(")") else statement
        text.append(f"{indent}{statement.replace(chr(39), chr(34))}{end}")
        text.append(end * chance.choice([0, 0, 1]))
    return "".join(text)


def _statement(words: tuple[str, ...], comma: str) -> str:
    if not words[0].startswith(("result_", "changed_")):
        return " ".join(words)
    return f"{words[0]} = call({comma.join(repr(word) for word in words[1:])})"
