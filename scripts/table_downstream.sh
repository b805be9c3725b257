#!/usr/bin/env bash
# Tables tab:downstream and tab:edu_downstream: zero-shot tasks through lm-evaluation-harness.
# SCALE=nano (default): three small tasks made of held-out text (evaluating/tasks.py), two CPU cores, no network.
# SCALE=single (one GPU of 24 GB) and SCALE=paper (8 x A100 80GB): ARC-E, ARC-C, HellaSwag, PIQA, MMLU, SciQ,
# SummScreen and LAMBADA from the hub.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# The paper, FineWeb 124M: softmax 39.77 23.72 32.42 64.09 22.97 60.6 1.682, LSSAR 40.57 22.61 33.03 65.34 22.97
# 62.1 6.309; the six Edu models in paper.json.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt requirements-downstream.txt
exec python reproduce.py downstream --scale "${SCALE:-nano}" "$@"
