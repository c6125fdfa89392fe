#!/usr/bin/env bash
# From a fresh clone to a fine-tuned SmolLM2-135M on two CPU processes, with one command:  bash scripts/quickstart.sh
# Arguments are handed to train.py as they are, for instance training.num_train_epochs=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh demo
.venv/bin/python scripts/prepare_embedded.py

# `accelerate launch --cpu --num_processes 2` would run a single process; this runs two, and port 0 is any free one.
# One thread each: two cores are enough.
export ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
.venv/bin/accelerate launch --multi_gpu --num_machines 1 --num_processes 2 --main_process_port 0 \
    --mixed_precision no --dynamo_backend no scripts/train.py --config configs/quickstart.yaml "$@"

output=runs/quickstart
echo "Checkpoints: $(find "$PWD/$output" -maxdepth 1 -name 'checkpoint-*' | sort | paste -sd ' ')"
echo "Pictures:    $(find "$PWD/$output" -name '*.png' | sort | paste -sd ' ')"
