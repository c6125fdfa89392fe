#!/usr/bin/env bash
# Trains as a job of a Ray cluster that takes jobs (its dashboard runs; KubeRay's does):  on a machine that reaches it,
#     RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 bash examples/deploy/ray_job.sh configs/qwen3-8b-128k.yaml data.path=/data/documents.jsonl
# The repository's folder goes along, without what examples/deploy/ray_runtime.yaml leaves out; torch and what else pyproject.toml
# names must be on the cluster's machines (an image of the Dockerfile). The job's ranks share one machine with GPUS (8) free
# GPUs. Whoever reaches that address runs programs there: keep it on loopback, and come by `kubectl port-forward` or ssh -L.
# The same line again goes on from the newest checkpoint: output_dir must be a folder that outlasts the job.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

[ $# -ge 1 ] || { sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
command -v ray >/dev/null || export PATH="$PWD/.venv/bin:$PATH"
gpus=${GPUS:-8}
exec ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" --working-dir . \
    --runtime-env examples/deploy/ray_runtime.yaml --entrypoint-num-gpus "$gpus" -- \
    env RANKS="$gpus" bash scripts/torchrun.sh "$@"
