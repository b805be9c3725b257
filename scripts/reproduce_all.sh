#!/usr/bin/env bash
# Every table and figure of the paper: `bash scripts/reproduce_all.sh [--plan]`, SCALE=nano (default) or paper.
# Options as of reproduce.py; --plan prints the cost and starts nothing.
# Runs that several tables use are trained once. Interrupted, it continues; a failed run stops no other.
# Hours: nano about 4 on two CPU cores; paper 126 on 8 x A100 80GB at 40 % MFU, physics and evaluation not counted.
# The paper's numbers are in paper/paper.json, and beside ours in the printed tables and in site/index.html.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh requirements.txt requirements-downstream.txt requirements-physics.txt

plan='' tables='' physics=() previous=''
for argument in "$@"; do # those of reproduce.py, which refuses others; physics knows two of them
  case $argument in
    -h | --help) exec python reproduce.py --help ;;
    --plan) plan=yes && physics+=(--plan) ;;
    --tables-only) tables=yes ;;
    --gpus=*) physics+=("$argument") ;;
  esac
  [ "$previous" = --gpus ] && physics+=(--gpus "$argument")
  previous=$argument
done

code=0
python reproduce.py all --scale "${SCALE:-nano}" "$@" || code=$?
[ "$code" -ge 2 ] && exit "$code" # a mistake or Ctrl-C, not a failed run
[ "$tables" ] || bash scripts/table_physics.sh "${physics[@]}" || code=1
[ "$plan" ] && exit "$code"
python report.py results/ --out site/
exit "$code"
