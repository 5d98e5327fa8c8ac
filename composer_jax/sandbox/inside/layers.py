"""Workspaces as overlays: a pristine tree below, what a sandbox changed in a layer of its own above.

The zygote makes the layers, each a small file system with a size of its own, in a mount namespace that its sandboxes
inherit. When a sandbox is frozen its layer becomes one more tree for others to stand on, so that copying a workspace of
any size costs two mounts. A sandbox sees nothing of this but the overlay: the layers are covered before it hears of
any task, and it has no right to uncover them.

Without isolation there are no mounts: trees are folders, and standing on one means copying it.
"""

import os
import shutil
from typing import Any

from . import namespaces

HIDDEN = "/opt/composer/hidden"
LAYERS, TREES = f"{HIDDEN}/layers", f"{HIDDEN}/trees"
EMPTY = "empty"
FOLDERS = 1 << 26  # room for the folders of sixteen thousand layers


class Layers:
    """The zygote's side: one folder for each layer, `changes` and `work` in it as the kernel wants them."""

    def __init__(self, config: dict[str, Any]):
        self.isolated: bool = config["isolated"]
        self.size: int = config["limits"]["workspace_bytes"]
        self.root = LAYERS if self.isolated else config["scratch"]
        if self.isolated:
            namespaces.keep_mounts()
            namespaces.mount_sized(self.root, FOLDERS)
            os.mkdir(f"{self.root}/{EMPTY}")
        self.frozen: set[str] = set()

    def make(self, name: str) -> None:
        """A layer for a sandbox that is about to be forked."""
        folder = f"{self.root}/{name}"
        os.mkdir(folder)
        if self.isolated:
            namespaces.mount_sized(folder, self.size)
            os.mkdir(f"{folder}/work")
        os.mkdir(f"{folder}/changes")

    def ended(self, name: str) -> None:
        """The sandbox has gone; unless it was frozen, so does its layer."""
        if name not in self.frozen:
            self._remove(name)

    def drop(self, name: str) -> None:
        """Nobody stands on a frozen layer any more."""
        if name in self.frozen:
            self.frozen.discard(name)
            self._remove(name)

    def _remove(self, name: str) -> None:
        folder = f"{self.root}/{name}"
        if not self.isolated:
            shutil.rmtree(folder, ignore_errors=True)
        elif os.path.isdir(folder):
            namespaces.unmount(folder)
            os.rmdir(folder)


def stand_on(config: dict[str, Any], name: str, tree: dict[str, Any]) -> str:
    """The sandbox's side: its workspace, on a tree; the path of it.

    tree: {"base": a folder of TREES or None, "layers": frozen layers, the oldest first}.
    """
    if config["isolated"]:
        os.chdir(LAYERS)  # the names of all layers have to fit into one page
        base = f"{TREES}/{tree['base']}" if tree["base"] else EMPTY
        lower = [f"{layer}/changes" for layer in reversed(tree["layers"])] + [base]
        namespaces.mount_overlay("/workspace", lower, name)
        namespaces.cover(HIDDEN)
        return "/workspace"
    # Each frozen folder is whole here.
    root, trees = f"{config['scratch']}/{name}/changes", config["trees"]
    below = f"{config['scratch']}/{tree['layers'][-1]}/changes" if tree["layers"] else f"{trees}/{tree['base']}"
    if tree["layers"] or tree["base"]:
        shutil.copytree(below, root, symlinks=True, dirs_exist_ok=True)
    return root
