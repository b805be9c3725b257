#!/usr/bin/env bash
# The tests: `bash scripts/test.sh [TIER] [pytest arguments]`. Makes .venv when missing and installs what the tier needs.
#   (none)             style and the default tier: everything that needs no other package, four minutes on two cores
#   --gpu-rehearsal    the GPU code: a stand-in device, Triton's interpreter, compilation for sm_80 and sm_90
#   --ecosystem        installation, transformers, fine-tuning stacks, lm-eval, the page in a browser
#   --physics          orbits and force laws
#   --drill            several processes, killed nodes, long rows; then attacks on files, processes and input, which
#                      write docs/reliability.md; with [--jobs 2] [NAME ...] these attacks alone
set -euo pipefail
cd "$(dirname "$0")/.."

tier=default
case "${1:-}" in
  --gpu-rehearsal | --ecosystem | --physics | --drill)
    tier=${1#--}
    shift
    ;;
esac
needs=(requirements.txt requirements-test.txt)
case $tier in
  ecosystem) needs+=(requirements-downstream.txt requirements-ecosystem.txt) ;;
  physics) needs+=(requirements-physics.txt) ;;
esac
source scripts/env.sh "${needs[@]}"

# One torch thread per process: two on two cores beat one with two threads.
export OMP_NUM_THREADS=1
if [ "$tier" = drill ]; then
  if [ $# = 0 ]; then
    python -m pytest -n auto --maxprocesses=8 --tier=drill
  fi
  PYTHONPATH=.:tests exec python -m drill "$@"
fi
if [ "$tier" = default ]; then
  echo "== ruff"
  # What git tracks: editors and runs leave Python files of their own.
  git -c safe.directory="$PWD" ls-files -z '*.py' | xargs -0 ruff check
  git -c safe.directory="$PWD" ls-files -z '*.py' | xargs -0 ruff format --check
fi
if [ "$tier" = ecosystem ]; then
  bash scripts/browser.sh
fi
echo "== pytest, tier $tier"
exec python -m pytest -n auto --maxprocesses=8 --tier="$tier" "$@"
