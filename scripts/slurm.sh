#!/usr/bin/env bash
#SBATCH --job-name=lssar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@180
#SBATCH --output=slurm-%j.log
# Multi-node training: `sbatch scripts/slurm.sh configs/gpt2-124m-lssar.toml [--section.key=value ...]`.
# Set the lines above to your cluster. One torchrun per node meets the others at the first node.
# Three minutes before the time limit SLURM signals this script (--signal), which passes it on: the
# run finishes its step, saves and ends, the job goes back into the queue, and --resume continues.
# So does a run that was preempted; one that failed does not.
# The run directory and the data must be on a file system that all nodes share.
set -euo pipefail
[ "${SLURM_SUBMIT_DIR:-}" ] || { echo "error: start this with sbatch: sbatch scripts/slurm.sh CONFIG" >&2; exit 2; }
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate

read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000)) # two jobs may share a node
# Time to save: torchrun kills its workers 30 seconds after the signal, if not told otherwise.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150
# A store of its own for every restart: nodes that restart for different reasons count differently.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# torchrun's exit code is 1 whether the run was stopped or failed, so the run itself is asked.
before=$(python train.py "$@" --status) || [ $? != 2 ] || exit 2

requeue=''
stop() {
  requeue=yes
  kill -TERM "$step" || true
}
trap stop TERM

srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_NNODES" --nproc_per_node="$SLURM_GPUS_ON_NODE" --max-restarts=3 \
  --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$head:$port" \
  train.py "$@" --resume &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done # a signal ends `wait` early

code=0
after=$(python train.py "$@" --status) || code=$?
echo "$after"
[ "$code" = 0 ] && exit 0
# Stopped, though not by this script, and further than it was: preempted.
[ "$code" = 75 ] && [ "$after" != "$before" ] && requeue=yes
[ "$requeue" ] || exit 1
scontrol requeue "$SLURM_JOB_ID"
