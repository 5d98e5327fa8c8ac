"""One difference between a workspace and its tree."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Change:
    """One path at which a workspace differs from the folder it was made from.

    kind: "file", "link", "folder" (a new one), or "gone" (the path and everything below it).
    data: the content of a file, the target of a link as bytes, else empty.
    mode: permission bits.
    """

    kind: Literal["file", "link", "folder", "gone"]
    data: bytes = b""
    mode: int = 0o644


GONE = Change("gone", mode=0)
