"""The tool that applies a patch to any number of files: all of it, or nothing."""

from composer_jax.agent.patches.apply import apply_hunks
from composer_jax.agent.patches.envelope import outdent_headers, parse_patch
from composer_jax.agent.patches.file_text import decode_text, encode_text
from composer_jax.agent.tools.browse import read_bytes
from composer_jax.agent.tools.paths import refuse_links, resolve_file, resolve_path
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.tools.tool import Tool, object_schema
from composer_jax.agent.workspace import Workspace
from composer_jax.tasks.patches import FilePatch, PatchError


async def apply_patch(workspace: Workspace, patch: str) -> str:
    """Applies a unified diff, or a patch from *** Begin Patch to *** End Patch."""
    try:
        draft, answers = _draft(workspace, patch)
    except (PatchError, ToolError) as error:
        raise ToolError(f"{error}; nothing was changed" if "\n" not in str(error) else str(error)) from error
    workspace.replace(draft.files)
    return "\n".join(answers)


def _draft(workspace: Workspace, text: str) -> "tuple[_Draft, list[str]]":
    """The files after a patch and what was done to each. Raises PatchError and ToolError."""
    draft = _Draft(workspace)
    try:
        return draft, [draft.apply(one) for one in parse_patch(text)]
    except (PatchError, ToolError) as error:
        outdented = outdent_headers(text)
        if outdented == text:
            raise
        draft = _Draft(workspace)
        try:
            return draft, [draft.apply(one) for one in parse_patch(outdented)]
        except (PatchError, ToolError):
            raise error from None


class _Draft:
    """The files after the patch. files: path -> (content, mode); None: deleted."""

    def __init__(self, workspace: Workspace):
        self.workspace = workspace
        self.files: dict[str, tuple[bytes, int | None] | None] = {}

    def apply(self, patch: FilePatch) -> str:
        """Applies the patch of one file and describes it. Raises PatchError and ToolError."""
        old = None if patch.old_path is None else self._resolve(patch.old_path)
        new = self._resolve((patch.old_path or "") if patch.new_path is None else patch.new_path)
        if old is None:
            self._require_free(new)
            self.files[new] = self._patch_data(b"", patch), 0o755 if patch.executable else None
            return f"created {new}"
        data, mode = self._read(old)
        data = self._patch_data(data, patch)
        if patch.new_path is None:
            if patch.hunks and data:
                raise PatchError(
                    f"{old} is to be deleted, but the patch does not remove all of its lines; remove all or none"
                )
            self._remove(old)
            return f"deleted {old}"
        if patch.executable is not None:
            mode = 0o755 if patch.executable else 0o644
        if new != old:
            self._require_free(new)
            self._remove(old)
        self.files[new] = data, mode
        return f"edited {new}" if new == old else f"moved {old} to {new}"

    def _resolve(self, path: str) -> str:
        resolved = resolve_path(self.workspace, path)
        if not resolved:
            raise PatchError("the patch names the workspace itself where a file should be")
        refuse_links(self.workspace, resolved)
        return resolved

    def _read(self, path: str) -> tuple[bytes, int]:
        known = self.files.get(path)
        if known is not None:
            return known[0], 0o644 if known[1] is None else known[1]
        if path in self.files:
            raise PatchError(f"the patch itself removes {path} before it changes it; leave one of them out")
        resolve_file(self.workspace, path)
        return read_bytes(self.workspace, path), self.workspace.mode(path)

    def _require_free(self, path: str) -> None:
        known = self.files[path] if path in self.files else self.workspace.kind(path)
        if known is not None:
            raise PatchError(f"{path} is there already; update it, or choose another path")

    def _remove(self, path: str) -> None:
        if self.workspace.kind(path) == "file":
            self.files[path] = None
        else:  # this patch created it
            del self.files[path]

    def _patch_data(self, data: bytes, patch: FilePatch) -> bytes:
        if not patch.hunks:
            return data
        text = decode_text(patch.path, data)
        try:
            after = apply_hunks(text, patch.hunks)
        except PatchError as error:
            raise PatchError(f"{patch.path}: {error}") from error
        return encode_text(patch.path, after, text)


APPLY_PATCH = Tool(
    "apply_patch",
    "Apply a unified diff, or a patch from *** Begin Patch to *** End Patch, to any number of files: all of it or "
    "nothing.",
    object_schema(("patch",), patch={"type": "string", "maxLength": 1 << 20, "description": "the patch"}),
    apply_patch,
)
