#!/usr/bin/env bash
# Every table and figure of the paper: `bash scripts/reproduce_all.sh [--plan]`, SCALE=nano (default), single or paper.
# Takes the options of reproduce.py; --plan prints the cost and starts nothing.
# Runs that several tables use are trained once. Interrupted, it continues; a failed run stops no other.
# Hours, with evaluation: nano 5.6 on two cores (422 runs, from recorded speeds); single 64 on an RTX 4090 and
# paper 148 on 8 x A100 80GB, both estimated. Physics: 0.5, 6 and 8 more. On one GPU a night is enough for
# `python reproduce.py headline --scale single --seeds 0`: LSSAR, its baselines and the controls.
# The paper's numbers are in paper/paper.json, and beside ours in the printed tables and in site/index.html.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt requirements-downstream.txt requirements-physics.txt

plan='' tables='' physics=() previous=''
for argument in "$@"; do # those of reproduce.py, which refuses others; physics knows some of them
  case $argument in
    -h | --help) exec python reproduce.py --help ;;
    --plan) plan=yes && physics+=(--plan) ;;
    --tables-only) tables=yes ;;
    --seeds=* | --gpus=* | --gpu=*) physics+=("$argument") ;;
  esac
  case $previous in --seeds | --gpus | --gpu) physics+=("$previous" "$argument") ;; esac
  previous=$argument
done

code=0
python reproduce.py all --scale "${SCALE:-nano}" "$@" || code=$?
[ "$code" -ge 2 ] && exit "$code" # a mistake or Ctrl-C, not a failed run
[ "$tables" ] || bash scripts/table_physics.sh "${physics[@]}" || code=1
[ "$plan" ] && exit "$code"
python report.py results/ --out site/
exit "$code"
