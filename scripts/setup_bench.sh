#!/usr/bin/env bash
# Installs the peers that benchmarks/ measures, beside what scripts/setup.sh installs. DeepSpeed goes into a folder of its
# own, which only the ranks that measure it look into: accelerate imports it wherever it finds it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh bench demo test
peers=.cache/peers
if [ ! -d "$peers/deepspeed" ]; then
    DS_BUILD_OPS=0 .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --target "$peers" \
        deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 py-cpuinfo==9.0.0 ninja==1.13.2
fi
if [ ! -d "$peers/megatron" ]; then
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --target "$peers" megatron-core==0.16.1 verl==0.9.1
fi
