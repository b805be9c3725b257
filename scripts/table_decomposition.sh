#!/usr/bin/env bash
# Table tab:decomsoft: softmax without its exponential, without its l1 norm, without both.
# SCALE=nano (default): two CPU cores, no network. SCALE=paper: 8 x A100 80GB.
# Options as of reproduce.py; --plan prints the cost and starts nothing.
# Hours: nano 10 minutes; paper 8.8 on 8 GPUs (4 runs).
# The paper at 1K: I (x) 3.4138, II (exp) 3.247, III (x, l1) 3.3297, IV (softmax) 3.1911.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py decomposition --scale "${SCALE:-nano}" "$@"
