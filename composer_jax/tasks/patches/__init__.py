"""One model of a diff: its files and hunks, the unified format, the difference of two texts, and workspace changes."""

from composer_jax.tasks.patches.patch import (
    FilePatch,
    Hunk,
    PatchError,
    diff_lines,
    merge_versions,
    split_lines,
)
from composer_jax.tasks.patches.unified import format_unified, header_paths, parse_unified, starts_file

__all__ = [
    "FilePatch",
    "Hunk",
    "PatchError",
    "diff_lines",
    "format_unified",
    "header_paths",
    "merge_versions",
    "parse_unified",
    "split_lines",
    "starts_file",
]
