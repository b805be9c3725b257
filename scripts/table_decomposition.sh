#!/usr/bin/env bash
# Table tab:decomsoft: softmax without its exponential, without its l1 norm, without both.
# SCALE=nano (default): two CPU cores, no network. SCALE=single: one GPU of 24 GB. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# The paper at 1K: I (x) 3.4138, II (exp) 3.247, III (x, l1) 3.3297, IV (softmax) 3.1911.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py decomposition --scale "${SCALE:-nano}" "$@"
