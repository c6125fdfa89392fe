#!/usr/bin/env bash
# One hour on a machine with GPUs: what holds there of all that was written without one, as records and one page.
#     bash scripts/gpu_acceptance.sh                     # stop it when you like: the same command goes on
#     bash scripts/gpu_acceptance.sh --minutes 20
#     bash scripts/gpu_acceptance.sh --device cpu --tiny # a look without a GPU
# Without .venv it sets that up first; GPU_ACCEPTANCE_PYTHON=/path/to/python takes another environment, which has the package and its tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${GPU_ACCEPTANCE_PYTHON:-}" ]; then
    [ -x .venv/bin/python ] || bash scripts/setup.sh demo test
    GPU_ACCEPTANCE_PYTHON=.venv/bin/python
fi
exec "$GPU_ACCEPTANCE_PYTHON" benchmarks/gpu_acceptance.py "$@"
