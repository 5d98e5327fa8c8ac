"""Patches as models write them: unified diffs, and an envelope with file headers; and their application to a text."""

from composer_jax.agent.patches.apply import apply_hunks
from composer_jax.agent.patches.envelope import parse_envelope
from composer_jax.tasks.patches import FilePatch, parse_unified

__all__ = ["apply_hunks", "parse_patch"]


def parse_patch(text: str) -> list[FilePatch]:
    """The patches of all files in a text of either format. Raises PatchError with one sentence for an invalid one."""
    if text.lstrip().startswith("*** Begin Patch"):
        return parse_envelope(text)
    return parse_unified(text)
