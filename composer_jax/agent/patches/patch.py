"""What a patch says, whatever its format."""

from dataclasses import dataclass


class PatchError(Exception):
    """A text that is no patch, or a patch that does not fit; one sentence for the model."""


@dataclass(frozen=True)
class Hunk:
    """Lines that become other lines.

    old, new: lines with their line breaks, of which a file's last may have none. start: number of the first old line,
    or of the line after which a hunk without old lines goes; None: not told. anchors: lines somewhere above it, in
    order. at_end: the old lines are the last of the file.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    start: int | None = None
    anchors: tuple[str, ...] = ()
    at_end: bool = False


@dataclass(frozen=True)
class FilePatch:
    """What happens to one file.

    old, new: its path before and after; old is None for a file that is created, new for one that is deleted.
    executable: whether it is made so, or made not so; None: it stays.
    """

    old: str | None
    new: str | None
    hunks: tuple[Hunk, ...] = ()
    executable: bool | None = None

    @property
    def name(self) -> str:
        """The path to call it by."""
        return self.new or self.old or ""
