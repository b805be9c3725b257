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
# Set the lines above to your cluster. One torchrun a node meets the others at the first node.
# Three minutes before the time limit SLURM signals this script (--signal), which passes it on: the
# run finishes its step, saves and ends, the job goes back into the queue, and --resume continues.
# The run directory and the data must be on a file system that all nodes share.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
source .venv/bin/activate

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

requeue() {
  kill -TERM "$step"
  wait "$step" || true
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}
trap requeue TERM

srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_NNODES" --nproc_per_node=8 --max-restarts=3 \
  --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$head:29500" \
  train.py "$@" --resume &
step=$!
wait "$step"
