"""What a workspace holds that its tree does not."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Change:
    """One path of a workspace that differs from the folder that the workspace was made of.

    kind: "file", "link", "folder" (one that was not there), or "gone" (it and all that was below it).
    data: the content of a file, the target of a link as bytes, else nothing.
    mode: permission bits.
    """

    kind: Literal["file", "link", "folder", "gone"]
    data: bytes = b""
    mode: int = 0o644


GONE = Change("gone", mode=0)
