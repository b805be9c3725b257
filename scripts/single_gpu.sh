#!/usr/bin/env bash
# The main experiment on one GPU: `[HOURS=1] [DATA=corpora/mine] bash scripts/single_gpu.sh [--section.key=value ...]`.
# Needs one GPU of 24 GB (RTX 4090, A100, ...), a network for 2.4 GB of data, 10 GB of disk, and four hours.
# Downloads FineWeb as tokens, trains the 45M model with softmax, with LSSAR, and with layers of two kinds (configs/
# single-far.toml) for an hour each, evaluates them at 1x to 16x the training length, on passkeys too, and draws.
# Run again, it continues or shows what is there.
#
# How many steps an hour has is measured, not guessed: 30 steps of each mechanism come first, and all of them then
# train for as many steps as the slowest makes in HOURS, so that they see the same tokens.
# Not run on hardware yet, so there is no expected loss; on an RTX 4090 an hour is an estimated 0.7B tokens.
# Without a GPU it says so and ends with code 2; DEVICE=cpu rehearses it on a CPU. Options
# --section.key=value go to train.py; LENGTH and TOKENS are the training length and the number of tokens to evaluate on.
set -euo pipefail
cd "$(dirname "$0")/.."
HOURS=${HOURS:-1} own=${DATA:-} DATA=${DATA:-corpora/fineweb1B} DEVICE=${DEVICE:-cuda} LENGTH=${LENGTH:-1024} TOKENS=${TOKENS:-10485760}
runs=runs/single_gpu results=results/single_gpu
stop() {
  echo "error: $*" >&2
  exit 2
}
[[ $HOURS =~ ^[0-9]*\.?[0-9]+$ && ! $HOURS =~ ^[0.]+$ ]] || stop "HOURS=$HOURS is not a number of hours above 0"
for argument in "$@"; do
  [[ $argument == --*.*=* ]] || stop "single_gpu.sh takes --section.key=value of train.py, not '$argument'"
done
[ -z "$own" ] || [ -e "$DATA/manifest.json" ] ||
  stop "DATA=$DATA is not a prepared set; make it from your own text (python data/prepare.py text FOLDER --tokeniser gpt2" \
    "--out $DATA) or from FineWeb (python data/prepare.py download fineweb --shards 11 --out $DATA)"
if [ -s "$runs/steps" ]; then # the schedule of what is there
  read -r began _ <"$runs/steps"
  [ "$began" = "$HOURS" ] || stop "$runs was begun with HOURS=$began; use that, or move it and $results away"
fi
# Before anything is installed; a container may have a GPU without nvidia-smi.
if [ "$DEVICE" = cuda ] && ! nvidia-smi -L 2>/dev/null && [ ! -e /dev/nvidia0 ]; then
  stop "no GPU was found: check nvidia-smi; without one, bash scripts/quickstart.sh runs on a CPU"
fi
source scripts/env.sh requirements.txt
[ "$DEVICE" != cuda ] || python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  stop "torch does not see the GPU; install the torch build for your driver into .venv (nvidia-smi names its CUDA)"

mechanisms=(softmax lssar far)
multiples=$((LENGTH)),$((2 * LENGTH)),$((4 * LENGTH)),$((8 * LENGTH)),$((16 * LENGTH))
train() { # train NAME CONFIG OPTIONS...
  local name=$1 config=$2
  shift 2
  python train.py "configs/single-$config.toml" --device "$DEVICE" --resume --log.directory="$runs" --log.name="$name" \
    --data.directory="$DATA" --train.length="$LENGTH" "$@"
}

echo "== 1/5 data: $DATA"
[ -e "$DATA/manifest.json" ] || python data/prepare.py download fineweb --shards 11 --out "$DATA"

echo "== 2/5 how many steps $HOURS h have: 30 of each mechanism"
if [ ! -s "$runs/steps" ]; then
  for mechanism in "${mechanisms[@]}"; do
    train "speed-$mechanism" "$mechanism" "$@" --train.steps=30 --train.warmup=1 --log.interval=5 --eval.interval=30 \
      --checkpoint.interval=30
  done
  python - "$HOURS" "$runs" "${mechanisms[@]/#/speed-}" <<'PY'
import sys
from pathlib import Path

from training.config import parse_config
from training.run_log import read_metrics

hours, runs, *names = sys.argv[1:]
steps = []
for run in (Path(runs, name) for name in names):
    *_, rate = (m["tokens_per_s"] for m in read_metrics(run) if "tokens_per_s" in m)  # the last: compiled and warm
    batch = parse_config((run / "config.toml").read_text(), str(run)).train.batch_tokens
    steps.append(int(0.95 * 3600 * float(hours) * rate / batch))  # a twentieth for validation and saving
    print(f"{run.name}: {rate:,.0f} tokens/s, {steps[-1]:,} steps")
Path(runs, "steps").write_text(f"{hours} {max(10, min(steps))}\n")
PY
fi
read -r _ steps <"$runs/steps"

echo "== 3/5 training: $steps steps each"
for mechanism in "${mechanisms[@]}"; do
  train "$mechanism" "$mechanism" "$@" --train.steps="$steps" --train.warmup="$((steps / 18))"
done

echo "== 4/5 evaluation at 1x to 16x the training length, with a sliding window as the control, and passkeys"
mkdir -p "$results"
checkpoints=("${mechanisms[@]/#/$runs/}")
python eval_extrapolation.py "${checkpoints[@]}" --device "$DEVICE" --data "$DATA" --lengths "$multiples" \
  --tokens "$TOKENS" --window "$LENGTH" --out "$results/extrapolation.json"
python passkey.py "${checkpoints[@]}" --device "$DEVICE" --lengths "$LENGTH,$((2 * LENGTH)),$((4 * LENGTH))" \
  --out "$results/passkey.json"

echo "== 5/5 attention maps"
python attention_maps.py "${checkpoints[@]}" --device "$DEVICE" --out "$results/maps.json"

cat <<TXT

== Summary: trained at $LENGTH tokens for $steps steps, evaluated at 1x to 16x that length
$(python eval_extrapolation.py "${checkpoints[@]}" --device "$DEVICE" --data "$DATA" --lengths "$multiples" \
  --tokens "$TOKENS" --window "$LENGTH" --out "$results/extrapolation.json" --short)

A sliding window of the training length is the control: a flat curve alone does not show that far context is used,
the far-context benefit does (positive, the far context helps).
  figures       $results/extrapolation.png, $results/passkey.png, $results/maps-*.png
  loss curves   $runs/{softmax,lssar,far}/loss.png
Next:
  the paper's tables at this size   SCALE=single bash scripts/reproduce_all.sh --plan
  a night of them                   python reproduce.py headline --scale single --seeds 0 --plan
TXT
