"""The model of a diff, whatever its format: the change of one file, and its hunks."""

from dataclasses import dataclass


class PatchError(Exception):
    """A text that is not a patch, or a patch that does not fit; one sentence for the model."""


@dataclass(frozen=True)
class Hunk:
    """Old lines and the new lines that replace them.

    old, new: lines with their line breaks; the last line of a file may lack one.
    start: number of the first old line, from 1; where `old` is empty, the number of the line above the insertion.
      None if the patch does not state it.
    anchors: lines somewhere above the hunk, in order.
    at_end: whether the old lines are the last of the file.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    start: int | None = None
    anchors: tuple[str, ...] = ()
    at_end: bool = False

    @property
    def old_range(self) -> tuple[int, int]:
        """The replaced lines as a half-open range from 0; `start` must be set."""
        if self.start is None:
            raise ValueError("the hunk does not state where it starts")
        first = self.start - 1 if self.old else self.start
        return first, first + len(self.old)


@dataclass(frozen=True)
class FilePatch:
    """The change of one file.

    old_path, new_path: its path before and after; old_path is None for a created file, new_path for a deleted one.
    executable: the mode that the patch sets, executable or not; None leaves the mode as it is.
    """

    old_path: str | None
    new_path: str | None
    hunks: tuple[Hunk, ...] = ()
    executable: bool | None = None

    @property
    def path(self) -> str:
        """The path after the change, or that of the deleted file."""
        return self.new_path or self.old_path or ""
