#!/usr/bin/env bash
# Tables tab:downstream and tab:edu_downstream: zero-shot tasks through lm-evaluation-harness.
# SCALE=nano (default): three small tasks made of held-out text (evaluating/tasks.py), two CPU cores, no network.
# SCALE=paper: ARC-E, ARC-C, HellaSwag, PIQA, MMLU, SciQ, SummScreen, LAMBADA from the hub; 8 x A100 80GB.
# Options as of reproduce.py; --plan prints the cost and starts nothing.
# Hours: nano 20 minutes; paper 49 on 8 GPUs when nothing is trained yet.
# The paper, FineWeb 124M: softmax 39.77 23.72 32.42 64.09 22.97 60.6 1.682, LSSAR 40.57 22.61 33.03 65.34 22.97
# 62.1 6.309; the six Edu models in paper.json.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt requirements-downstream.txt
exec python reproduce.py downstream --scale "${SCALE:-nano}" "$@"
