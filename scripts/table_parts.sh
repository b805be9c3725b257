#!/usr/bin/env bash
# LSSAR's effect in parts (sec:lengthgate; how sharply they attend: fig:attmap): softmax, softmax of cosines with
# other scales and with LSSAR's own, LSSA, LSSAR; the cosine that a key needs for half of the weight among N; and
# softmax, softmax of cosines and LSSAR with Muon in place of AdamW (app:training_config).
# SCALE=nano (default): two CPU cores, no network. SCALE=paper: 8 x A100 80GB, without the other scales.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# Hours: nano 0.5 on two cores; paper 17 on 8 GPUs, for runs that other tables have too.
# Expected at nano, five seeds, 1x / 16x: softmax of cosines 1.69 / 2.13, LSSAR 1.74 / 1.99, softmax 1.73 / 2.52.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py parts half_weight --scale "${SCALE:-nano}" "$@"
