#!/usr/bin/env bash
# tab:symbolic_regression, fig:force_earth and fig:force_all_planets:
# `[SCALE=nano|paper] bash scripts/table_physics.sh [--plan] [--gpus 8]`.
# Do models of simulated orbits find Newton's law? Softmax and LSSAR, pre-trained on orbits, fine-tuned on
# forces; symbolic regression on the forces they predict, beside the KNN oracle and the true forces.
#
# SCALE=nano (default): one CPU core, about ten minutes. Short orbits, a 0.75M model.
# SCALE=paper: 8 x A100 80GB, 2 x 1.8 hours of pre-training, 2 x 0.9 hours of fine-tuning on one GPU each
#   (estimates of train.py --dry-run at 40 % MFU), some CPU-hours of simulation and regression, 50 GB of disk.
#   The paper's numbers: oracle 25.85 m1/r^2, LSSAR 27.02 m1/r^2, softmax no physical form; truth 39.48.
#   PySR is used when installed (pip install pysr, needs Julia), Operon otherwise.
#
# --plan prints runs, tokens, hours and disk and starts nothing; --gpus N trains on N.
# Results: results/$SCALE/physics.json and physics*.png, results/$SCALE/symbolic_regression.json.
# Results: results/$SCALE/physics.json and physics*.png; `python report.py` makes the table.
# Run again after an interruption, it continues; what is done is not done again. SEEDS="0 1 2" pre-trains
# one run of each mechanism per seed.
set -euo pipefail
cd "$(dirname "$0")/.."
SCALE=${SCALE:-nano}
plan='' gpus=8
while [ $# -gt 0 ]; do
  case $1 in
    --plan) plan=yes ;;
    --gpus=*) gpus=${1#*=} ;;
    --gpus) gpus=${2:-none} && shift "$(($# > 1))" ;;
    *) gpus="'$1'" && break ;;
  esac
  shift
done
if ! [[ $gpus =~ ^[1-9][0-9]*$ ]]; then
  echo "error: table_physics.sh takes --plan and --gpus N, not $gpus" >&2
  exit 2
fi

case $SCALE in
  nano)
    data=corpora/physics-nano size=nano launch=(python) points=101 sequences=20000
    shape=(--points "$points" --bins 500)
    # Of planets as light as the paper's no model can tell the mass: it moves the star by less than a bin.
    orbits=(--heavy --planets 1 --sequences "$sequences" --val-sequences 500 --shard-sequences 5000)
    forces=(--heavy --labelled 4000 --probed 200 --held-out 200 --unit deviation)
    search=(--population 200 --evaluations 15000)
    ;;
  paper)
    data=corpora/physics size=109m points=1000 sequences=10000000
    launch=(torchrun --standalone "--nproc_per_node=$gpus")
    shape=(--points "$points") orbits=(--sequences "$sequences") forces=() search=()
    ;;
  *)
    echo "error: SCALE=$SCALE is unknown; choose nano or paper" >&2
    exit 2
    ;;
esac
source scripts/env.sh requirements.txt requirements-physics.txt

if [ "$plan" ]; then
  # shellcheck disable=SC2086
  exec python physics/physics_plan.py "$size" --data "$data" --points "$points" --sequences "$sequences" \
    --seeds ${SEEDS:-0} --gpus "$gpus"
fi

echo "== 1/4 simulation"
python physics/simulate.py orbits "${shape[@]}" "${orbits[@]}" --out "$data/orbits"
python physics/simulate.py forces "${shape[@]}" "${forces[@]}" --out "$data/forces"
python physics/simulate.py planets "${shape[@]}" --out "$data/planets"

echo "== 2/4 pre-training"
runs=()
for seed in ${SEEDS:-0}; do
  for attention in softmax lssar; do
    name="physics-$size-$attention" && [ "$seed" = 0 ] || name+="-s$seed"
    "${launch[@]}" train.py "configs/physics-$size-$attention.toml" --resume "--train.seed=$seed" "--log.name=$name"
    runs+=("runs/$name")
  done
done

echo "== 3/4 fine-tuning on forces"
for run in "${runs[@]}"; do
  for task in magnitude vector; do
    python physics/force.py "$task" "$run" --config "configs/physics-$size-$task.toml"
  done
done

echo "== 4/4 symbolic regression, figures"
python physics/discover.py "${runs[@]}" "${search[@]}" \
  --forces "$data/forces" --planets "$data/planets" \
  --out "results/$SCALE/physics.json"
