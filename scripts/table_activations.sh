#!/usr/bin/env bash
# Table tab:activationcomp: eight activations before the l1 norm.
# SCALE=nano (default): two CPU cores, no network. SCALE=single: one GPU of 24 GB. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# The paper at 1K: ReLU 3.2006, ReLU^2 3.2494, ReLU6 3.2039, GeLU 3.2051, Sigmoid 3.2000, Softplus 3.1901,
# Mish 3.2001, exp 3.1911.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py activations --scale "${SCALE:-nano}" "$@"
