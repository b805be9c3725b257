#!/usr/bin/env bash
# Table tab:comp_analysis: milliseconds and megabytes of a training step and of an evaluation.
# SCALE=nano (default): the nano model on this CPU. SCALE=single: the 45M model, SCALE=paper: GPT-2 124M, both
# batch 4 x 1024 on one GPU.
# The paper (A100, train ms / MB, eval ms / MB): softmax 120.48 / 9609.45, 49.26 / 2324.71;
# LSSA 169.92 / 12071.23, 58.56 / 2325.58; LSSAR 250.32 / 16685.57, 81.15 / 2325.58.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py cost --scale "${SCALE:-nano}" "$@"
