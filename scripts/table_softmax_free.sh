#!/usr/bin/env bash
# Table tab:softmaxfreeatt: validation loss of 16 attention mechanisms at 1x to 16x the training length.
# SCALE=nano (default): two CPU cores, no network. SCALE=single: one GPU of 24 GB. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# The paper, at 1K / 2K / 4K / 8K: softmax 3.1911 4.1662 5.4513 6.2823, LSSA 3.1905 4.1301 5.2960 5.9403,
# LSSAR p=15 3.1905 3.1930 3.2291 3.3171; all 16 rows in paper.json. Added: a sliding window as the control,
# and the far-context benefit.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py softmax_free --scale "${SCALE:-nano}" "$@"
