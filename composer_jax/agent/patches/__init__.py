"""Patches in the two formats that models write: unified diffs, and an envelope with file headers."""

from composer_jax.agent.patches.apply import apply_hunks
from composer_jax.agent.patches.envelope import parse_envelope
from composer_jax.agent.patches.patch import FilePatch, Hunk, PatchError
from composer_jax.agent.patches.unified import parse_unified

__all__ = ["FilePatch", "Hunk", "PatchError", "apply_hunks", "parse"]


def parse(text: str) -> list[FilePatch]:
    """The patches of the files that a text is about. Raises PatchError, with one sentence, if it is no patch."""
    if text.lstrip().startswith("*** Begin Patch"):
        return parse_envelope(text)
    return parse_unified(text)
