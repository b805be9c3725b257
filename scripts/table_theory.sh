#!/usr/bin/env bash
# Computes what the paper derives (app:gradient_analysis, app:algorithm, sec:lengthscaled): gradient decay of softmax
# and LSSA, the log-space identity, the limit of large p with ties, gradients of suppressed keys, dead rows, overflow of
# x^15 by type and row length.
# SCALE=nano or paper: the same numbers, half a minute on one CPU core, nothing is trained.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py theory --scale "${SCALE:-nano}" "$@"
