#!/usr/bin/env bash
# tab:symbolic_regression, fig:force_earth and fig:force_all_planets:
# `[SCALE=nano|single|paper] bash scripts/table_physics.sh [--plan] [--seeds 0,1,2] [--gpus 8]`.
# Do models of simulated orbits find Newton's law? Softmax and LSSAR, pre-trained on orbits, fine-tuned on
# forces; symbolic regression on the forces they predict, beside the KNN oracle and the true forces.
#
# SCALE=nano (default): one CPU core, six to nine minutes per seed, three seeds. Short orbits of heavy planets, a
#   0.75M model. The planets are heavier than the paper's, there are 500 bins and the engine is Operon. The position of
#   the planet alone tells most of the force, so the exponent of m1 shows more than R^2 does.
# SCALE=single: one GPU of 24 GB. The 45M model's shape, 2M sequences.
# SCALE=paper: 8 x A100 80GB, 50 GB of disk.
#   The paper's numbers: oracle 25.85 m1/r^2, LSSAR 27.02 m1/r^2, softmax no physical form; truth 39.48.
#   PySR is used when installed (pip install pysr, needs Julia), Operon otherwise.
#
# Takes the options of reproduce.py; --plan prints the cost and starts nothing. Its job there is this script
# with --run, which simulates, trains and searches. Run again after an interruption, it continues; what is done is not done again.
set -euo pipefail
cd "$(dirname "$0")/.."
SCALE=${SCALE:-nano}
source scripts/env.sh requirements.txt requirements-physics.txt
if [ "${1:-}" != --run ]; then
  exec python reproduce.py physics --scale "$SCALE" "$@"
fi

gpus='' smaller=() fewer=()
case $SCALE in
  nano)
    data=corpora/physics-nano size=nano config=physics-nano launch=(python) points=101 sequences=20000
    shape=(--points "$points" --bins 500)
    # Of planets as light as the paper's no model can tell the mass: it moves the star by less than a bin.
    orbits=(--heavy --planets 1 --sequences "$sequences" --val-sequences 500 --shard-sequences 5000)
    forces=(--heavy --labelled 4000 --probed 200 --held-out 200 --unit deviation)
    search=(--population 200 --evaluations 15000)
    seeds=${SEEDS:-0,1,2} gpus=${GPUS:-1}
    export OMP_NUM_THREADS=1 # the last bits of a run depend on it
    ;;
  single | paper)
    data=corpora/physics size=109m config=physics-109m points=1000 sequences=10000000 seeds=${SEEDS:-0}
    if [ "$SCALE" = single ]; then # the 45M model's shape, a fifth of the sequences
      data=corpora/physics-single size=single sequences=2000000 gpus=${GPUS:-1}
      smaller=(--model.preset=45m) fewer=(--train.steps=3906)
    fi
    gpus=${gpus:-${GPUS:-8}} launch=(torchrun --standalone "--nproc_per_node=$gpus")
    shape=(--points "$points") orbits=(--sequences "$sequences") forces=() search=()
    ;;
  *)
    echo "error: SCALE=$SCALE is unknown; choose nano, single or paper" >&2
    exit 2
    ;;
esac

echo "== 1/4 simulation"
python physics/simulate.py orbits "${shape[@]}" "${orbits[@]}" --out "$data/orbits"
python physics/simulate.py forces "${shape[@]}" ${forces[@]+"${forces[@]}"} --out "$data/forces"
python physics/simulate.py planets "${shape[@]}" --out "$data/planets"

echo "== 2/4 pre-training"
runs=()
for seed in ${seeds//,/ }; do
  for attention in softmax lssar; do
    name="physics-$size-$attention" && [ "$seed" = 0 ] || name+="-s$seed"
    "${launch[@]}" physics/train.py "configs/$config.toml" --resume "--attention.name=$attention" "--train.seed=$seed" \
      "--log.name=$name" "--data.directory=$data/orbits" ${smaller[@]+"${smaller[@]}"} ${fewer[@]+"${fewer[@]}"}
    runs+=("runs/$name")
  done
done

echo "== 3/4 fine-tuning on forces"
for run in "${runs[@]}"; do
  python physics/force.py magnitude "$run" --config "configs/$config-magnitude.toml" "--data.directory=$data/forces" \
    ${smaller[@]+"${smaller[@]}"}
  python physics/force.py vector "$run" --config "configs/$config-vector.toml" "--data.directory=$data/planets" \
    ${smaller[@]+"${smaller[@]}"}
done

echo "== 4/4 symbolic regression, figures"
python physics/discover.py "${runs[@]}" ${search[@]+"${search[@]}"} \
  --forces "$data/forces" --planets "$data/planets" \
  --out "$OUT"
