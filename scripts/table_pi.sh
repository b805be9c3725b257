#!/usr/bin/env bash
# Tables tab:lssar_pi_valloss and tab:lssar_pi_passkey: LSSAR fine-tuned with position interpolation to 2x, 4x, 8x.
# SCALE=nano (default): two CPU cores, no network. SCALE=single: one GPU of 24 GB. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# The paper at 2K / 4K / 8K: base 3.1930 3.2291 3.3171 and 34 15 3 %; with PI 3.1636 3.1560 3.1638 and 83 48 21 %.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py pi --scale "${SCALE:-nano}" "$@"
