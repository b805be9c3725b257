#!/usr/bin/env bash
# The test suite: `bash scripts/test.sh [pytest arguments]`; with `--slow` first, the slow tests alone.
# `bash scripts/test.sh --drill [--jobs 2] [NAME ...]` attacks the system and writes docs/reliability.md.
# Makes .venv when missing, installs what the tests need, checks style, runs the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt requirements-test.txt requirements-downstream.txt requirements-physics.txt

if [ "${1:-}" = "--drill" ]; then
  shift
  OMP_NUM_THREADS=1 PYTHONPATH=.:tests exec python -m drill "$@"
fi

select=(-m "not slow")
if [ "${1:-}" = "--slow" ]; then
  select=(-m slow)
  shift
fi

echo "== ruff"
ruff check .
ruff format --check .
echo "== pytest"
# One torch thread per worker: two workers on two cores beat one worker with two threads.
OMP_NUM_THREADS=1 python -m pytest -n auto --maxprocesses=8 "${select[@]}" "$@"
