#!/usr/bin/env bash
# LSSAR's effect in parts (sec:lengthgate; how sharply they attend: fig:attmap): softmax, softmax of cosines with
# other scales and with LSSAR's own, LSSA, LSSAR; the cosine that a key needs for half of the weight among N; and
# softmax, softmax of cosines and LSSAR with Muon in place of AdamW (app:training_config).
# SCALE=nano (default): two CPU cores, no network. SCALE=paper: 8 x A100 80GB, softmax of cosines alone.
# Options as of reproduce.py; --plan prints the cost and starts nothing.
# Hours: nano 1; paper 18 on 8 GPUs (1 run beside those of other tables).
# Expected at nano, three seeds, 1x / 16x: softmax of cosines 1.69 / 2.13, LSSAR 1.74 / 1.98, softmax 1.73 / 2.52.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py parts half_weight --scale "${SCALE:-nano}" "$@"
