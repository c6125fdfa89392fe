#!/usr/bin/env bash
# What tests draw at random, drawn often and anew, on 8 ranks, and every combination of sharding, adapters, model,
# checkpointing and offload, and what tests marked nightly do; for a night. Arguments go to pytest:
#     bash scripts/nightly.sh -k alibi
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh demo test
HYPOTHESIS_PROFILE=nightly .venv/bin/python -m pytest --ranks=8 --matrix \
    tests/attention/test_modes.py tests/attention/test_engine.py tests/layouts/test_schedule.py tests/layouts/test_layout.py \
    tests/models/test_exactness.py tests/parallel/test_sharding.py tests/planner/test_planner.py \
    tests/planner/baselines/test_baselines.py "$@"
.venv/bin/python -m pytest --matrix -m nightly "$@"

# What is written for other programs, compared with them; they stay out of .venv.
peers=$(mktemp -d)
trap 'rm -rf "$peers"' EXIT
.venv/bin/python -m pip --disable-pip-version-check install --quiet --target "$peers" skypilot kubeflow-trainer-api
PYTHONPATH=$peers .venv/bin/python scripts/check_deploy.py
