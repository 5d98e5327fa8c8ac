"""The shell part of the set-up: a fresh environment, nothing done twice, a sentence where it cannot work."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    """Runs bash in a folder that holds setup_venv.sh and two requirements files that require nothing."""
    shutil.copy(ROOT / "launch" / "setup_venv.sh", tmp_path)
    for name in ("requirements.txt", "requirements-test.txt"):
        (tmp_path / name).write_text("# nothing\n")

    def run(code: str, **env: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", f"set -euo pipefail; . ./setup_venv.sh; {code}"],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": sys.executable, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    return run


def test_makes_an_environment_once_and_installs_what_changed(run, tmp_path):
    both = 'setup_venv "$PWD/env" "$PWD/requirements.txt" "$PWD/requirements-test.txt"; "$VENV_PYTHON" -V'
    code, out = run(both)
    assert code == 0 and "making" in out
    assert "packages of requirements.txt" in out and "packages of requirements-test.txt" in out
    code, out = run(both)
    assert code == 0 and out.startswith("Python 3") and "composer_jax" not in out, "nothing changed, nothing said"
    (tmp_path / "requirements.txt").write_text("# still nothing\n")
    code, out = run(both)
    assert code == 0 and "making" not in out and "packages of requirements.txt" in out
    (tmp_path / "requirements.txt").write_text("no-such-package-of-ours @ file:///nowhere.whl\n")
    code, out = run(both)
    assert code == 1 and "installing requirements.txt failed" in out
    code, out = run(both)
    assert code == 1, "what failed is tried again"


def test_an_interrupted_attempt_is_made_anew(run, tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / ".unfinished").touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    code, out = run('setup_venv "$PWD/env"; "$VENV_PYTHON" -m pip --version')
    assert code == 0 and "making" in out and not (tmp_path / "env" / ".unfinished").exists()


def test_folders_of_others_are_left_alone(run, tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "thesis.tex").touch()
    code, out = run('setup_venv "$PWD/env"')
    assert code == 1 and "is not a virtual environment" in out
    (tmp_path / "env" / "pyvenv.cfg").touch()
    code, out = run('setup_venv "$PWD/env"')
    assert code == 1 and "delete it" in out and (tmp_path / "env" / "thesis.tex").exists()


def fake_python(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_what_is_missing_is_named(run, tmp_path):
    old = fake_python(tmp_path / "old", '[ "$1" = -V ] && echo Python 3.9.2 && exit 0; exit 1')
    code, out = run('setup_venv "$PWD/env"', PYTHON=old)
    assert code == 1 and "Python 3.11 or newer is needed (found: Python 3.9.2)" in out
    code, out = run('setup_venv "$PWD/env"', PYTHON=str(tmp_path / "nothing"))
    assert code == 1 and "Python 3.11 or newer is needed" in out
    bare = fake_python(
        tmp_path / "bare",
        f'case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"',
    )
    code, out = run('setup_venv "$PWD/env"', PYTHON=bare)
    assert code == 1 and "sudo apt-get install python3-venv" in out
    assert not (tmp_path / "env").exists()


def test_the_compilation_cache_is_kept_apart_per_cpu(run, tmp_path):
    code, out = run('use_compilation_cache "$PWD/env"; echo "$JAX_COMPILATION_CACHE_DIR"')
    assert code == 0 and out.startswith(f"{tmp_path}/.cache/composer_jax/jax-")
    code, out = run('use_compilation_cache "$PWD/env"; echo "$JAX_COMPILATION_CACHE_DIR"', HOME="/proc/none")
    assert code == 0 and out.startswith(f"{tmp_path}/env/cache/jax-")
    code, out = run('use_compilation_cache x; echo "$JAX_COMPILATION_CACHE_DIR"', JAX_COMPILATION_CACHE_DIR="/c")
    assert out == "/c\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--python=no-such-python", "no-such-python is not a program; name a Python, such as --python=python3"),
        ("--model=/nowhere.gguf", "/nowhere.gguf does not exist; name a GGUF file or a folder"),
        (
            "--long --python=./bare",
            "/bare cannot run composer_jax (no packages); pip install -r requirements.txt into it",
        ),
    ],
)
def test_smollm2_refuses_a_python_or_a_model_that_it_cannot_use(tmp_path, flags, sentence):
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\necho no packages >&2\nexit 1\n")
    bare.chmod(0o755)
    script = ROOT / "launch" / "smollm2.sh"
    done = subprocess.run(["bash", script, *flags.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and sentence in done.stderr
    assert not done.stdout and list(tmp_path.iterdir()) == [bare]
