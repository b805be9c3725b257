#!/usr/bin/env bash
# LSSAR's effect in parts (sec:lengthgate; how sharply they attend: fig:attmap): softmax, softmax of cosines with
# other scales and with LSSAR's own, LSSA, LSSAR. Then the cosine that a key needs for half of the weight among N. Then
# softmax, softmax of cosines and LSSAR with Muon in place of AdamW (app:training_config), and with other heads (heads).
# SCALE=nano (default): two CPU cores, no network. SCALE=paper: 8 x A100 80GB, without the other scales.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py parts half_weight --scale "${SCALE:-nano}" "$@"
