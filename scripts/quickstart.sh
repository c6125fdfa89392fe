#!/usr/bin/env bash
# From a fresh clone to a fine-tuned SmolLM2-135M on two CPU processes, with one command:  bash scripts/quickstart.sh
# Arguments are handed to train.py as they are, for instance training.num_train_epochs=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "1 of 4  environment"
bash scripts/setup.sh demo

# Bars of other libraries are not drawn: two processes would draw over each other, and the lines below say how far it is.
export TQDM_DISABLE=1 TOKENIZERS_PARALLELISM=false
echo "2 of 4  model and documents"
prepared=$(.venv/bin/python scripts/prepare_embedded.py)
echo "$prepared"

# `accelerate launch --cpu --num_processes 2` would run a single process; this runs two, and port 0 is any free one.
# One thread each: two cores are enough. glibc is told to give large blocks back when they are freed: with its own settings both
# processes together grew to 5.9 GiB, with these to 5.2, for 6 of 60 CPU seconds more (two cores, float32).
echo "3 of 4  training: two processes start and load the model, about 20 s"
ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 \
    MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=1000000 MALLOC_TRIM_THRESHOLD_=268435456 \
    .venv/bin/accelerate launch --multi_gpu --num_machines 1 --num_processes 2 --main_process_port 0 \
    --mixed_precision no --dynamo_backend no scripts/train.py --config configs/quickstart.yaml "$@"

# The same comparison once more, by transformers alone: the checkpoint needs nothing of hf_longctx.
output=runs/quickstart
for argument in "$@"; do
    case $argument in training.output_dir=*) output=${argument#*=} ;; esac
done
echo "4 of 4  verification, about 20 s"
.venv/bin/python scripts/compare_checkpoint.py "$(sed -n 's/^model *//p' <<<"$prepared")" "$output" \
    --documents "$(sed -n 's/^corpus *//p' <<<"$prepared")"

echo "checkpoint  $output"
echo "report      $output/report.html"
echo "pictures    $output/plan.png  $output/loss.png"
echo "next        source .venv/bin/activate    puts hf-longctx and accelerate, which are in .venv, on the path"
