#!/usr/bin/env bash
# Checks that everything works on this GPU, and how fast: `bash scripts/gpu_check.sh [--quick]`.
# Without a GPU it says so and ends with code 2; `--device cpu` rehearses it on a CPU.
# For the first time on new hardware. Makes .venv, installs, compares the fused kernel with float64,
# takes training steps, and measures. Half an hour or so.
# Results: results/gpu_check.json and a block to paste into an issue; exit code 1 if anything failed.
set -euo pipefail
cd "$(dirname "$0")/.."

# Before anything is installed; a container may have a GPU without nvidia-smi.
if [[ " $* " != *" --device"* ]] && ! nvidia-smi -L 2>/dev/null && [ ! -e /dev/nvidia0 ]; then
  echo "error: no GPU was found: check nvidia-smi; --device cpu rehearses the checks on a CPU" >&2
  exit 2
fi
source scripts/env.sh requirements.txt requirements-test.txt
exec python benchmark.py gpu-check --out results/gpu_check.json "$@"
