#!/usr/bin/env bash
# Table tab:lambada_results: accuracy and perplexity on LAMBADA (OpenAI split).
# SCALE=nano (default): the cloze task of evaluating/tasks.py in its place.
# SCALE=single: one GPU of 24 GB. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# The paper, accuracy / perplexity: 124M FineWeb softmax 31.51 / 45.12, LSSAR 30.52 / 48.27; 45M Edu 5.86 / 1397.36
# and 18.57 / 361.96; 124M Edu 8.79 / 10720.58 and 30.37 / 48.35; 355M Edu 12.40 / 263.69 and 35.47 / 33.27.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt requirements-downstream.txt
exec python reproduce.py lambada --scale "${SCALE:-nano}" "$@"
