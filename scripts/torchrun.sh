#!/usr/bin/env bash
# Trains on one machine or several, without a queue:  run the same line on each machine,
#     HEAD=first-machine NODES=4 bash scripts/torchrun.sh my.yaml longctx.sharding=zero3
# Alone (NODES=1, the default) no HEAD is needed. Ranks on each machine: RANKS, by default its GPUs. What follows the
# configuration are overrides, as of scripts/train.py. With training.resume_from_checkpoint=auto (set here) the job is
# started again up to RESTARTS (3) times from its newest checkpoint when a rank or a machine fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -ge 1 ] || { sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
config=$1; shift
command -v torchrun >/dev/null || export PATH="$PWD/.venv/bin:$PATH"
ranks=${RANKS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
[ "$ranks" -ge 1 ] || { echo "no GPU is seen here: set RANKS, and training.use_cpu=true, to train on CPUs" >&2; exit 2; }

# Restarted ranks must not find addresses of dead ones (docs/lasting_runs.md).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
meeting=(--rdzv-backend c10d --rdzv-id "${JOB:-hf_longctx}" --rdzv-endpoint "${HEAD:-127.0.0.1}:${PORT:-29500}")
if [ "${NODES:-1}" = 1 ]; then
    meeting=(--standalone)
elif [ -z "${HEAD:-}" ]; then
    echo "NODES=$NODES needs HEAD, a name or address of the first machine that all others reach" >&2
    exit 2
fi
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "$ranks" --max-restarts "${RESTARTS:-3}" "${meeting[@]}" \
    scripts/train.py --config "$config" training.resume_from_checkpoint=auto "$@"
