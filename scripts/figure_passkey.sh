#!/usr/bin/env bash
# Figure fig:passkey_accuracy: passkey retrieval at 1x, 1.5x, 2x, 4x, 8x the training length.
# SCALE=nano (default): two CPU cores, no network. SCALE=single: one GPU of 24 GB. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# At nano scale byte-level models are trained on passkey prompts alone: none learns it from ordinary text.
# The paper at 1K / 1.5K / 2K / 4K / 8K: softmax 64 0 0 0 0 %, LSSAR p=15 86 45 34 20 3 %.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py passkey --scale "${SCALE:-nano}" "$@"
