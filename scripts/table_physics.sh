#!/usr/bin/env bash
# tab:symbolic_regression, fig:force_earth and fig:force_all_planets: `[SCALE=nano|paper] bash scripts/table_physics.sh`.
# Do models of simulated orbits find Newton's law? Softmax and LSSAR, pre-trained on orbits, fine-tuned on
# forces; symbolic regression on the forces they predict, beside the KNN oracle and the true forces.
#
# SCALE=nano (default): one CPU core, about ten minutes. Short orbits, a 0.75M model.
# SCALE=paper: 8 x A100 80GB, 2 x 1.8 hours of pre-training, 2 x 0.9 hours of fine-tuning on one GPU each
#   (estimates of train.py --dry-run at 40 % MFU), some CPU-hours of simulation and regression, 50 GB of disk.
#   The paper's numbers: oracle 25.85 m1/r^2, LSSAR 27.02 m1/r^2, softmax no physical form; truth 39.48.
#   PySR is used when installed (pip install pysr, needs Julia), Operon otherwise.
#
# Results: results/$SCALE/physics.json and physics*.png, results/$SCALE/symbolic_regression.json.
# Run again after an interruption, it continues; what is done is not done again.
set -euo pipefail
cd "$(dirname "$0")/.."
SCALE=${SCALE:-nano}
source scripts/env.sh requirements.txt requirements-physics.txt

case $SCALE in
  nano)
    data=corpora/physics-nano size=nano launch=(python)
    shape=(--points 101 --bins 500)
    orbits=(--planets 1 --sequences 20000 --val-sequences 500 --shard-sequences 5000)
    forces=(--labelled 1800 --probed 200 --held-out 60 --unit deviation)
    search=(--population 200 --evaluations 15000)
    ;;
  paper)
    data=corpora/physics size=109m
    launch=(torchrun --standalone "--nproc_per_node=${GPUS:-8}")
    shape=() orbits=() forces=() search=()
    ;;
  *)
    echo "error: SCALE=$SCALE is unknown; choose nano or paper" >&2
    exit 2
    ;;
esac

echo "== 1/4 simulation"
python physics/simulate.py orbits "${shape[@]}" "${orbits[@]}" --out "$data/orbits"
python physics/simulate.py forces "${shape[@]}" "${forces[@]}" --out "$data/forces"
python physics/simulate.py planets "${shape[@]}" --out "$data/planets"

echo "== 2/4 pre-training"
for attention in softmax lssar; do
  "${launch[@]}" train.py "configs/physics-$size-$attention.toml" --resume
done

echo "== 3/4 fine-tuning on forces"
for attention in softmax lssar; do
  for task in magnitude vector; do
    python physics/force.py "$task" "runs/physics-$size-$attention" --config "configs/physics-$size-$task.toml"
  done
done

echo "== 4/4 symbolic regression, table, figures"
python physics/discover.py "runs/physics-$size-softmax" "runs/physics-$size-lssar" "${search[@]}" \
  --forces "$data/forces" --planets "$data/planets" \
  --out "results/$SCALE/physics.json" --table "results/$SCALE/symbolic_regression.json"
