#!/usr/bin/env bash
# The whole pipeline on this computer, set-up included:
#
#   bash launch/demo.sh [WORKDIR] [--config.FIELD=VALUE ...]
#
# WORKDIR defaults to runs/demo in the checkout; the same command continues a run that was stopped.
# COMPOSER_VENV=DIR uses another virtual environment than .venv; PYTHON=... makes it with another Python.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/launch/setup_venv.sh"

workdir=$root/runs/demo
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  case $1 in /*) workdir=$1 ;; *) workdir=$PWD/$1 ;; esac
  shift
fi

cd "$root"
venv=${COMPOSER_VENV:-$root/.venv}
setup_venv "$venv" "$root/requirements.txt"
use_compilation_cache "$venv"
# exec: a signal to this script reaches the pipeline, which then saves.
exec "$VENV_PYTHON" -m launch.pipeline --config=configs/tiny.py --workdir="$workdir" "$@"
