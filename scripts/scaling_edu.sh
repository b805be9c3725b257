#!/usr/bin/env bash
# Figures fig:edu_val_loss and fig:edu_passkey: softmax and LSSAR at three sizes (45M, 124M, 355M) on FineWeb-Edu.
# SCALE=nano (default): two CPU cores, no network. SCALE=paper: 8 x A100 80GB.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# At nano scale: 2 x 64, 3 x 128 and 4 x 192 (layers x width) on the one corpus there is, after equal steps.
# The paper: passkey at 1K, LSSAR 57 / 77 / 65 %, softmax 0 %; losses are drawn only.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py scaling_edu --scale "${SCALE:-nano}" "$@"
