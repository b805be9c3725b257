#!/usr/bin/env bash
# Does everything work on this GPU, and how fast: `bash scripts/gpu_check.sh [--quick]`.
# Without a GPU it says so and ends with code 2; `--device cpu` rehearses it on a CPU.
# For the first time on new hardware. Makes .venv, installs, puts every attention backend against the
# float64 reference, trains on two devices where there are two, and measures. About ten minutes.
# Results: results/gpu_check.json (please share it) and a table; exit code 1 if anything failed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt requirements-test.txt

if command -v nvidia-smi >/dev/null; then nvidia-smi -L || true; fi
exec python benchmark.py gpu-check --out results/gpu_check.json "$@"
