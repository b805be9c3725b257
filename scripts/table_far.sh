#!/usr/bin/env bash
# Does anything use far context? Plain RoPE models, local RoPE layers around a global one without positions, and
# the baselines: no positions, ALiBi, FoX, stick-breaking, RoPE removed after training, windows with sinks, NTK, YaRN.
# The same tokens for all (600 steps of 4,096 bytes at nano), so that a row can be added on a laptop: CONTRIBUTING.md.
# SCALE=nano (default): two CPU cores, no network; it has no rows at other scales yet.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt
exec python reproduce.py far --scale "${SCALE:-nano}" "$@"
