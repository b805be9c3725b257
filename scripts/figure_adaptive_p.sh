#!/usr/bin/env bash
# Figure fig:adaptive_p: LSSAR p=15 evaluated with an exponent that grows beyond the training length: losses, and
# passkeys (fig:adaptive_p, right).
# SCALE=nano (default): two CPU cores, no network. SCALE=single: one GPU of 24 GB. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# The paper at 16K: 3.45, with alpha = 0.1 3.31.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py adaptive_p --scale "${SCALE:-nano}" "$@"
