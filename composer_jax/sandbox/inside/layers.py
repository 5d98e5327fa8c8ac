"""Workspaces on trees: what a sandbox changed in a layer of its own, a pristine tree and frozen layers below.

The zygote makes the layers, each a small file system with a size of its own, in a mount namespace that its sandboxes
inherit. A workspace is an overlay of them; when a sandbox is frozen its layer becomes one more tree for others to stand
on, so that copying a workspace of any size costs two mounts. A sandbox sees nothing of this but the overlay: the layers
are covered before it hears of any task, and it has no right to uncover them.

Where overlays do not work (no namespaces, or a kernel before 6.6, whose file systems in memory lack the attributes that
overlays need) every layer is whole: standing on a tree means copying it.
"""

import os
from dataclasses import dataclass
from typing import Any

from . import copies, disk, namespaces

HIDDEN = "/opt/composer/hidden"
LAYERS, TREES = f"{HIDDEN}/layers", f"{HIDDEN}/trees"
WORKSPACE = "/workspace"
PACKAGES, TESTS, LOGS = "/opt/packages", "/tests", "/logs"
EMPTY_BASE = "empty"
PROBE = "probe"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
TMP = "tmp"  # in a sandbox's folder, where it has no /tmp of its own
PROGRAMS = "bin"  # in the scratch folder, where there is no /opt/bin
LAYER_ROOT_BYTES = 1 << 26  # room for the folders of sixteen thousand layers


class Layers:
    """The zygote's side: one folder for each layer, `changes` and `work` in it as the kernel wants them."""

    def __init__(self, config: dict[str, Any]):
        self.isolation: str = config["isolation"]
        self.size: int = config["limits"]["workspace_bytes"]
        self.root = LAYERS if self.isolation == "namespaces" else config["scratch"]
        self.frozen: set[str] = set()
        if self.isolation == "namespaces":
            namespaces.enter_mount_namespace()
            namespaces.mount_tmpfs(self.root, LAYER_ROOT_BYTES)
            os.mkdir(f"{self.root}/{EMPTY_BASE}")
        self.overlays = self.isolation == "namespaces" and config["overlays"] and self._overlays_work()

    def make(self, name: str) -> None:
        """A layer for a sandbox that is about to be forked."""
        folder = f"{self.root}/{name}"
        os.mkdir(folder)
        try:
            if self.isolation == "namespaces":
                namespaces.mount_tmpfs(folder, self.size)
            os.mkdir(f"{folder}/work")
            os.mkdir(f"{folder}/changes")
        except OSError:
            self._remove(name)
            raise

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
        if self.isolation != "namespaces":
            try:
                disk.remove_contents(folder)
                os.rmdir(folder)
            except OSError:
                return  # in use by what survived its worker: it goes with the whole scratch folder
        elif os.path.isdir(folder):
            if os.path.ismount(folder):
                namespaces.unmount(folder)
            # Sandboxes have views of the mount from when they were forked; with its folder those go, too.
            os.rmdir(folder)

    def _overlays_work(self) -> bool:
        """Tries what sandboxes will do: stand on a tree and change a file of it. (As root in some containers the trees'
        files belong to somebody else in here, and cannot be changed.)"""
        self.make(PROBE)
        try:
            os.setxattr(f"{self.root}/{PROBE}/changes", "user.composer", b"1")
            namespaces.mount_overlay(WORKSPACE, [f"{TREES}/{PROBE}"], f"{self.root}/{PROBE}")
            try:
                with open(f"{WORKSPACE}/file", "a") as file:
                    file.write("changed")
                os.rename(f"{WORKSPACE}/file", f"{WORKSPACE}/renamed")
            finally:
                namespaces.unmount(WORKSPACE)
            return True
        except OSError:
            return False
        finally:
            self._remove(PROBE)


@dataclass(frozen=True)
class MountedWorkspace:
    """Where a worker stands.

    root: path of the workspace. base: the open folder that it was made of, None if there was none. layers: the open
    folders of what was changed since, None where workspaces are copies. packages: path of what programs import, or "".
    """

    root: str
    base: int | None
    layers: list[int] | None
    packages: str


def mount_workspace(config: dict[str, Any], name: str, plan: dict[str, Any], overlays: bool) -> MountedWorkspace:
    """The sandbox's side: its workspace.

    plan: {"base": a folder of TREES or None, "layers": frozen layers, the oldest first, "packages", "tests": folders
    of TREES or None, to be shown at PACKAGES and TESTS}.
    """
    own_mounts = config["isolation"] == "namespaces"
    root, trees = (LAYERS, TREES) if own_mounts else (config["scratch"], config["trees"])
    base = f"{trees}/{plan['base']}" if plan["base"] else None
    opened = os.open(base, _FOLDER) if base else None
    layers, packages = None, ""
    if overlays:
        os.chdir(root)  # the names of all layers have to fit into one page
        lower = [f"{layer}/changes" for layer in reversed(plan["layers"])]
        namespaces.mount_overlay(WORKSPACE, [*lower, base or EMPTY_BASE], name)
        layers = [os.open(f"{layer}/changes", _FOLDER) for layer in (*plan["layers"], name)]
    else:
        changes = f"{root}/{name}/changes"
        if plan["layers"]:
            copies.copy_layer(f"{root}/{plan['layers'][-1]}", changes)
        elif base:
            copies.copy_tree(base, changes)
        if own_mounts:
            namespaces.bind_mount(changes, WORKSPACE)
    if plan["packages"]:
        packages = f"{trees}/{plan['packages']}"
        if own_mounts:
            namespaces.bind_mount(packages, PACKAGES)
            packages = PACKAGES
    if plan["tests"]:
        namespaces.bind_mount(f"{trees}/{plan['tests']}", TESTS)
    if not own_mounts:
        return MountedWorkspace(changes, opened, layers, packages)
    namespaces.hide_folder(HIDDEN)
    return MountedWorkspace(WORKSPACE, opened, layers, packages)


def sandbox_folders(config: dict[str, Any], name: str) -> tuple[str, str]:
    """Workspace and folder for temporary files of a sandbox that sees the host's file system."""
    return f"{config['scratch']}/{name}/changes", f"{config['scratch']}/{name}/{TMP}"
