"""The history file: messages that left the context at a summary, as text that the agent can read and grep.

It is written into a folder of the workspace that is neither graded nor counted as an edit. (Cursor's products keep such
a file; whether Composer's training does is not published.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from composer_jax.agent.transcript import Node
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat import ToolCall, compact_json
from composer_jax.data.chat_format import ChatFormat
from composer_jax.sandbox import Change, SandboxFileError

FOLDER, NAME = ".conversation", "history.txt"


class HistoryFile:
    """The history file of one episode; `add` appends to it."""

    def __init__(self) -> None:
        self.folder = ""
        """Folder of the file, relative to the workspace; "" before the first message was written."""
        self._text = ""

    async def add(self, workspace: Workspace, nodes: Sequence[Node], chat: ChatFormat) -> str:
        """Appends messages, and returns the path of the file; "" if the workspace has no room for it.

        The text is what the harness recorded: an agent that edits the file changes what it reads until the next call.
        """
        self._text += "".join(f"[{node.kind}]\n{_text(node, chat)}\n\n" for node in nodes)
        await workspace.prepare()
        self.folder = self.folder or _free_folder(workspace)
        path = f"{self.folder}/{NAME}"
        try:
            workspace.write(path, self._text.encode(errors="replace"))
        except SandboxFileError:  # full, or the agent put a link into the place
            return ""
        return path

    def without(self, changes: Mapping[str, Change]) -> dict[str, Change]:
        """Returns the changes outside of the folder: those of the agent, which are graded."""
        below = f"{self.folder}/"
        return {
            path: change
            for path, change in changes.items()
            if not self.folder or (path != self.folder and not path.startswith(below))
        }


def _free_folder(workspace: Workspace) -> str:
    """The first of .conversation, .conversation1, ... that the workspace does not have."""
    number, folder = 0, FOLDER
    while workspace.kind(folder) is not None:
        number += 1
        folder = f"{FOLDER}{number}"
    return folder


def _text(node: Node, chat: ChatFormat) -> str:
    """A message as text, calls included."""
    if node.kind == "tool":
        return chat.answer_text(node.tokens.tolist())
    if not node.sampled:
        return chat.tokenizer.decode(chat.user_body(node.tokens.tolist()))
    message = chat.parse(node.sampled_tokens.tolist())
    calls = [
        f"{call.name} {compact_json(call.arguments)}" if isinstance(call, ToolCall) else call.text
        for call in message.calls
    ]
    return "\n".join(part for part in (message.content, *calls) if part)
