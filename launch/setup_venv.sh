# Sourced by launch/demo.sh and tests/run.sh: a virtual environment that holds exactly the pinned packages.
#
#   setup_venv DIR FILE...   makes the environment DIR if there is none, and installs each requirements FILE if it
#                            changed since the last time; sets VENV_PYTHON to the environment's interpreter
#
# Needs bash, Python 3.11 or newer with its venv module, and a network the first time.

say() { printf 'composer_jax: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Prints the first interpreter that is new enough. PYTHON=... in the environment chooses one.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
    if [ "$candidate" = "${PYTHON:-}" ]; then break; fi
  done
  local version
  version=$("${PYTHON:-python3}" -V 2>&1) || version="none"
  die "Python 3.11 or newer is needed (found: $version). Install it, or name one: PYTHON=/path/to/python3.12"
}

make_venv() {
  local dir=$1 python
  python=$(find_python) || exit 1
  if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    die "$("$python" -V) has no venv module. On Debian or Ubuntu: sudo apt-get install python3-venv"
  fi
  say "making $dir with $("$python" -V)"
  # The marker distinguishes an interrupted attempt, which is repeated, from an environment of somebody else.
  { mkdir -p "$dir" && touch "$dir/.unfinished" && "$python" -m venv "$dir"; } ||
    die "cannot make the virtual environment $dir; is the disk full, or the folder read-only?"
  rm "$dir/.unfinished"
}

setup_venv() {
  local dir=$1 file key stamp started
  shift
  VENV_PYTHON=$dir/bin/python
  if [ -e "$dir/.unfinished" ]; then
    rm -rf "$dir"
  fi
  if [ ! -e "$dir" ] || [ -z "$(ls -A "$dir")" ]; then
    make_venv "$dir"
  elif [ ! -e "$dir/pyvenv.cfg" ]; then
    die "$dir exists and is not a virtual environment; choose another with COMPOSER_VENV=DIR"
  elif ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
    die "the virtual environment $dir has no working Python with pip (was it moved?); delete it and run again"
  fi
  "$VENV_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$dir holds $("$VENV_PYTHON" -V), 3.11 is the oldest that works; delete it or set COMPOSER_VENV=DIR"

  for file in "$@"; do
    stamp=$dir/.installed-$(basename "$file" .txt)
    # The files name each other, so any change of any of them counts.
    key="$("$VENV_PYTHON" -V) $(cat "$(dirname "$file")"/requirements*.txt | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
      say "installing the packages of $(basename "$file") into $dir (a minute or two, once)"
      started=$SECONDS
      # --quiet twice hides the warnings about an index that lacks a package which another index has.
      "$VENV_PYTHON" -m pip install --quiet --quiet --disable-pip-version-check --no-input -r "$file" ||
        die "installing $(basename "$file") failed, see above; it needs a network or PIP_INDEX_URL of a mirror"
      printf '%s' "$key" >"$stamp"
      say "installed in $((SECONDS - started)) s"
    fi
  done
}

# Keeps what JAX compiles between runs, in one folder per kind of CPU: compiled code is not portable between them.
use_compilation_cache() {
  local home=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/composer_jax cpu
  mkdir -p "$home" 2>/dev/null && [ -w "$home" ] || home=$1/cache
  cpu=$({ grep -m 1 '^flags' /proc/cpuinfo || uname -mp; } 2>/dev/null | cksum | cut -d ' ' -f 1)
  export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$home/jax-$cpu}
  export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0.2}
}
