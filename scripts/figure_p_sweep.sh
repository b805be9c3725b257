#!/usr/bin/env bash
# Figure fig:attcompare: the exponent p = 1, 3, 5, 10, 15, 20 for softmax and LSSA; at nano also 30 and 40, and
# LSSAR trained at 128, 256 and 512, for the paper's rule that longer training wants a larger p.
# SCALE=nano (default): two CPU cores, no network. SCALE=single: one GPU of 24 GB. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# The paper at 1K: softmax p=3 3.1879, p=15 5.3878; LSSA p=3 3.1782, p=15 3.1905; the rest is drawn only.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py p_sweep --scale "${SCALE:-nano}" "$@"
