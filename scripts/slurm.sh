#!/usr/bin/env bash
#SBATCH --job-name=hf_longctx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
# Trains on the machines of a SLURM job, from the repository's folder, which all of them must see:
#     sbatch --nodes 16 scripts/slurm.sh my.yaml longctx.sharding=zero3
# One launcher runs on each machine; they meet at the first one, with the job's number as their name. 180 s before the time
# limit SLURM sends SIGTERM: training saves and leaves, and the job is queued again and goes on from its newest checkpoint. So it
# does when training fails, unless that is within ten minutes, and SLURM does when a machine fails. To stop for good: scancel.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '11,15s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[ -n "${SLURM_JOB_ID:-}" ] || { echo "this runs under SLURM: sbatch scripts/slurm.sh CONFIG [section.key=value ...]" >&2; exit 2; }
cd "$SLURM_SUBMIT_DIR"
command -v torchrun >/dev/null || export PATH="$PWD/.venv/bin:$PATH"

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ranks=${RANKS:-${SLURM_GPUS_ON_NODE:-1}}
port=${PORT:-$((20000 + SLURM_JOB_ID % 20000))} # two jobs on one machine do not meet
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Since 22.05 srun does not take over what sbatch was told, and would bind a launcher and all its ranks to one processor.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

code=0
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "${machines[0]}:$port" \
    scripts/train.py --config "$1" training.resume_from_checkpoint=auto "${@:2}" || code=$?

# torchrun leaves with 1 whatever its ranks left with: a mistake in the configuration shows in how soon it ends.
if [ "$code" -ne 0 ] && [ "$SECONDS" -ge "${FAILS_BEFORE:-600}" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${REQUEUES:-20}" ]; then
    echo "training ended with exit code $code after $SECONDS s: queued again" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
