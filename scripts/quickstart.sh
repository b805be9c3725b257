#!/usr/bin/env bash
# The paper's main result at the smallest scale: `bash scripts/quickstart.sh`.
# Needs Python 3.11 or newer and two CPU cores; no GPU, no account, no data to download.
# Trains softmax and LSSAR side by side at length 256 on the Python standard library's sources, evaluates both at up to
# 16 times that length, and prints the losses beside the expected ones. Interrupted, it continues; run again, it shows
# what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -gt 0 ]; then
  echo "error: quickstart.sh takes no arguments, not '$1'; for a plan of every table: scripts/reproduce_all.sh --plan" >&2
  exit 2
fi
source scripts/env.sh requirements.txt

corpus=corpora/stdlib
out=runs/quickstart
if [ -s "$out/summary.txt" ]; then
  cat "$out/summary.txt"
  echo "(made before; to start again: rm -r $out)"
  exit 0
fi

echo "== 1/4 corpus: the Python standard library as bytes"
prepared=$(python data/prepare.py stdlib --out "$corpus")
echo "$prepared"

echo "== 2/4 training softmax and LSSAR side by side, 600 steps each"
mkdir -p "$out"
train() { # train ATTENTION, with one thread: the last bits depend on their number
  OMP_NUM_THREADS=1 exec python train.py "configs/nano-$1.toml" --log.directory="$out" --log.name="$1" \
    --data.directory="$corpus" --resume
}
train softmax >"$out/softmax.log" 2>&1 &
softmax=$!
train lssar &
lssar=$!
stop() { # both save and end, however this script ends
  kill "$softmax" "$lssar" 2>/dev/null || true
  wait
}
trap stop EXIT
if ! wait "$lssar"; then
  echo "error: training LSSAR ended early, see above; run this again to continue" >&2
  exit 1
fi
if ! wait "$softmax"; then
  tail -n 5 "$out/softmax.log" >&2
  echo "error: training softmax ended early, see above and $out/softmax.log; run this again to continue" >&2
  exit 1
fi
trap - EXIT

echo "== 3/4 evaluation at 1x to 16x the training length, with a sliding window as the control"
python eval_extrapolation.py "$out/softmax" "$out/lssar" --data "$corpus" --lengths 256,512,1024,2048,4096 \
  --tokens 131072 --spread --window 256 --out "$out/extrapolation.json" >"$out/evaluation.log"

echo "== 4/4 a sample from the LSSAR model"
python generate.py "$out/lssar" --prompt $'def ' --tokens 200

{
  echo
  python -m paper.quickstart "$out/extrapolation.json"
  grep '^note: ' <<<"$prepared" || true
  cat <<TXT

  figure        $out/extrapolation.png
  loss curves   $out/softmax/loss.png, $out/lssar/loss.png
Next:
  another mechanism     python train.py configs/nano-softmax.toml --attention.name=lssa --log.name=nano-lssa
  attention maps        python attention_maps.py $out/softmax $out/lssar --out $out/maps.json
  the whole paper       bash scripts/reproduce_all.sh --plan     (nano scale, this machine)
  on one GPU            bash scripts/single_gpu.sh
TXT
} >"$out/summary.tmp"
mv "$out/summary.tmp" "$out/summary.txt"
cat "$out/summary.txt"
