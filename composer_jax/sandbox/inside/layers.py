"""Workspaces as overlays: a layer for the changes of a sandbox, on top of frozen layers and a pristine tree.

The zygote mounts the layers, each a small tmpfs with a size limit, in a mount namespace that its sandboxes inherit. A
workspace is an overlay of them. When a sandbox is frozen, its layer becomes part of a tree for others, so copying a
workspace of any size costs two mounts. A sandbox sees only the overlay: the layers are hidden before it gets a request,
and it has no right to unmount what hides them.

Where overlays do not work (no namespaces, or a kernel before 6.6, whose tmpfs lacks the attributes that overlays need),
every layer is a complete copy of its tree.
"""

import os
import shutil
import sys
from dataclasses import dataclass
from typing import Any

from . import copies, disk, namespaces

HIDDEN = "/opt/composer/hidden"
LAYERS, TREES = f"{HIDDEN}/layers", f"{HIDDEN}/trees"
WORKSPACE = "/workspace"
PACKAGES, TESTS, SOLUTION, LOGS = "/opt/packages", "/tests", "/solution", "/logs"
EMPTY_BASE = "empty"
PROBE = "probe"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
TMP = "tmp"  # in the folder of a sandbox without a /tmp of its own
PROGRAMS = "bin"  # in the scratch folder, instead of /opt/bin
ALIASES = ("python", "python3")
LIBRARIES = "lib"
VIRTUAL_ENVIRONMENT = (PROGRAMS, LIBRARIES)
SITE = "site"  # beside this file: what is in site-packages
LAYER_ROOT_BYTES = 1 << 26  # bytes: room for the folders of 16,000 layers


class Layers:
    """The zygote's side: a folder per layer, with the folders `changes` and `work` that an overlay needs."""

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
        """Creates the layer of a sandbox that is about to be forked."""
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
        """Removes the layer of a sandbox that has ended, unless it was frozen."""
        if name not in self.frozen:
            self._remove(name)

    def drop(self, name: str) -> None:
        """Removes a frozen layer that no tree uses any more."""
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
                return  # a process that survived its worker uses it; it is removed with the scratch folder
        elif os.path.isdir(folder):
            if os.path.ismount(folder):
                namespaces.unmount(folder)
            # Sandboxes inherited copies of this mount when they were forked; removing its folder unmounts those, too.
            os.rmdir(folder)

    def _overlays_work(self) -> bool:
        """Mounts an overlay on a tree and changes a file of it.

        As root in some containers, files of the trees belong to another user in here and cannot be changed.
        """
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
    """A workspace as its worker sees it.

    root: path of the workspace. base: descriptor of the folder that it was made from; None: an empty one. layers:
    descriptors of the layers on top; None where workspaces are copies. packages: path of what programs import, or "".
    """

    root: str
    base: int | None
    layers: list[int] | None
    packages: str


def mount_workspace(config: dict[str, Any], name: str, plan: dict[str, Any], overlays: bool) -> MountedWorkspace:
    """The sandbox's side: mounts or copies the workspace, and mounts packages, tests and solution.

    plan: {"base": a folder of TREES or None, "layers": frozen layers, the oldest first, "packages", "tests",
    "solution": folders of TREES or None, mounted at PACKAGES, TESTS and SOLUTION}.
    """
    own_mounts = config["isolation"] == "namespaces"
    root, trees = (LAYERS, TREES) if own_mounts else (config["scratch"], config["trees"])
    base = f"{trees}/{plan['base']}" if plan["base"] else None
    opened = os.open(base, _FOLDER) if base else None
    layers, packages = None, ""
    if overlays:
        os.chdir(root)  # the mount options, with the names of all layers, must fit into one page
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
    if plan["solution"]:
        namespaces.bind_mount(f"{trees}/{plan['solution']}", SOLUTION)
    if not own_mounts:
        return MountedWorkspace(changes, opened, layers, packages)
    namespaces.hide_folder(HIDDEN)
    return MountedWorkspace(WORKSPACE, opened, layers, packages)


def sandbox_folders(config: dict[str, Any], name: str) -> tuple[str, str]:
    """Returns workspace and folder for temporary files of a sandbox that sees the file system of the host."""
    return f"{config['scratch']}/{name}/changes", f"{config['scratch']}/{name}/{TMP}"


def link_interpreter(executable: str, prefix: str, inside: str) -> str:
    """Makes `prefix` a virtual environment, in which the packages of the interpreter itself cannot be imported.

    Returns the folder of its programs. Its site-packages add the folder that COMPOSER_PACKAGES names to sys.path, so a
    command may set PYTHONPATH. inside: the folder of this file.
    """
    programs = f"{prefix}/{PROGRAMS}"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = f"{prefix}/{LIBRARIES}/{version}/site-packages"
    os.mkdir(programs)
    for alias in ALIASES:
        os.symlink(executable, f"{programs}/{alias}")
    with open(f"{programs}/pyvenv.cfg", "w", encoding="utf-8") as file:
        file.write(f"home = {os.path.dirname(executable)}\ninclude-system-site-packages = false\n")
    shutil.copytree(f"{inside}/{SITE}", site_packages)
    return programs
