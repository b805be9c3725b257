#!/usr/bin/env bash
# Figures fig:attmap, fig:attmap_d6, fig:attmap_d12, fig:attmap_d24: attention maps of the last layer, all heads.
# SCALE=nano (default): two CPU cores, no network. SCALE=single: one GPU of 24 GB. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# The paper shows maps and prints no number; here the mean weight on the first token stands beside them.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py attention_maps --scale "${SCALE:-nano}" "$@"
