"""Installs a peer into an environment of its own and plays conversations with it there."""

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class PeerError(RuntimeError):
    """A peer cannot be installed, or its script fails."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another engine. Its script is benchmarks/peers/play_NAME.py."""

    name: str
    requirements: Path
    """File with the exact versions of its packages, as pip reads it."""
    build_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of pip, for packages that are built from source."""


PEERS = {
    name: Peer(name, Path(__file__).parent / "requirements" / f"{name}.txt", variables)
    for name, variables in {
        "tunix": {},
        "transformers": {},
        "llama_cpp": {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
    }.items()
}


def cache_folder() -> Path:
    """Returns the folder of all peers' environments: ~/.cache/composer_jax/peers, or under XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "composer_jax" / "peers"


def read_pins(requirements: Path) -> dict[str, str]:
    """Returns {package: version} of a requirements file with exact versions."""
    lines = requirements.read_text(encoding="utf-8").splitlines()
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", "\n".join(lines), re.MULTILINE))


def is_installed_here(requirements: Path) -> bool:
    """Returns whether this process's environment has the versions of a requirements file.

    PyTorch's CPU build, 2.13.0+cpu, counts as 2.13.0.
    """
    try:
        pins = read_pins(requirements).items()
        return all(importlib.metadata.version(package).split("+")[0] == version for package, version in pins)
    except importlib.metadata.PackageNotFoundError:
        return False


def install(peer: Peer, cache: Path) -> Path:
    """Returns the interpreter of an environment with a peer's packages, made under `cache` unless it exists there.

    This process's own environment serves where it has the packages; a change of the peer's requirements makes its
    environment again.

    Raises:
      PeerError: the packages cannot be installed.
    """
    if is_installed_here(peer.requirements):
        return Path(sys.executable)
    folder = cache / peer.name
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    state = json.dumps([sys.version, peer.requirements.read_text(encoding="utf-8"), dict(peer.build_variables)])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == state and python.exists():
        return python
    try:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(peer.requirements)]
        variables = os.environ | dict(peer.build_variables)
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"{peer.name} cannot be installed into {folder}: {error}") from error
    if done.returncode:
        raise PeerError(f"{peer.name} cannot be installed into {folder}: {done.stderr.strip()[-1000:]}")
    stamp.write_text(state, encoding="utf-8")
    return python


def play_peer(peer: Peer, arguments: Sequence[str], cache: Path) -> dict[str, float]:
    """Returns the figures of a peer's script, the last line of its stdout as JSON. Installs the peer if need be.

    Raises:
      PeerError: the peer cannot be installed, or its script fails.
    """
    python = install(peer, cache)
    # The folder of compiled programs is JAX's, which google-tunix uses; the others ignore it.
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(cache / "xla")}
    command = [str(python), "-m", f"benchmarks.peers.play_{peer.name}", *arguments]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{peer.name} cannot play the conversations: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
