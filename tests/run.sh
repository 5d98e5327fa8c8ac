#!/usr/bin/env bash
# Lint, types and tests, set-up included:
#
#   bash tests/run.sh [--no-lint] [--slow] [ARGUMENTS OF PYTEST ...]      e.g. bash tests/run.sh tests/models -k mla
#
# --no-lint             leaves out lint and types, which the tests otherwise wait for
# --slow                also runs the tests marked `slow`, which take over ten seconds each; so does CI=true
# COMPOSER_VENV=DIR     another virtual environment than .venv-test
# COMPOSER_PARITY=1     also installs PyTorch and transformers and runs the tests marked `parity`; so does CI=true
# PYTHON=...            makes the environment with another Python
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/launch/setup_venv.sh"
cd "$root"

lint=1
if [ "${1:-}" = --no-lint ]; then
  lint=
  shift
fi
selection=(-m "not slow") # a later -m on the command line replaces it
if [ "${1:-}" = --slow ]; then
  selection=()
  shift
elif [ "${CI:-}" = true ]; then
  selection=()
fi
venv=${COMPOSER_VENV:-$root/.venv-test}
if [ "${CI:-}" = true ]; then
  export COMPOSER_PARITY=1
fi
setup_venv "$venv" "$root/requirements-test.txt"
if [ "${COMPOSER_PARITY:-}" = 1 ]; then
  setup_venv "$venv" "$root/requirements-parity.txt"
fi
use_compilation_cache "$venv"

if [ "$lint" ]; then
  "$VENV_PYTHON" -m ruff check --quiet .
  "$VENV_PYTHON" -m basedpyright --pythonpath "$VENV_PYTHON" --level error
fi
# loadfile: the tests of one file share what they compiled. conftest.py orders the files. A worker that crashes is not
# replaced: the run fails either way, but with another in its place xdist can wait for good at its end.
"$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 ${selection[@]+"${selection[@]}"} "$@"
