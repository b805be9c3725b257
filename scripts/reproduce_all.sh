#!/usr/bin/env bash
# Every table and figure of the paper: `bash scripts/reproduce_all.sh [--plan]`, SCALE=nano (default), mid, single, paper.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# Runs that several tables use are trained once. Interrupted, it continues; a failed run stops no other.
# On one GPU a night is enough for `python reproduce.py headline --scale single --seeds 0`: LSSAR, its baselines, the controls.
# The paper's numbers are in paper/paper.json, and beside ours in the printed tables and in site/index.html.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt requirements-downstream.txt requirements-physics.txt
exec python reproduce.py all --scale "${SCALE:-nano}" --page site "$@"
