#!/usr/bin/env bash
# Table tab:modifiedatt: softmax, its negative, re-centred, re-centred with an l1 norm.
# SCALE=nano (default): two CPU cores, no network. SCALE=single: one GPU of 24 GB. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# The paper at 1K: 3.1911, 3.1915, 3.2008, 3.1954.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py modified_scores --scale "${SCALE:-nano}" "$@"
