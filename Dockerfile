# hf_longctx in an image, for CPUs or for NVIDIA's GPUs; the repository's folder is what is sent to the builder:
#     docker build -t hf_longctx:cpu .
#     docker build -t hf_longctx:cuda --build-arg DEVICE=cuda .
#     docker run --rm -v "$PWD:/work" hf_longctx:cpu train my.yaml
#     docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" hf_longctx:cuda train my.yaml
# A user without rights runs what is in it, from /work, which is yours to mount; models of a hub and prepared data go to
# /home/user/.cache (mount a folder there, or they are gone with the container). No secret goes in: give HF_TOKEN to `docker run`.
# There is no compiler in it: flash-attn from source, torch.compile and Triton need an image of your own on top, with one.
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm
FROM ${PYTHON_IMAGE}

# cpu or cuda: torch's wheels for CUDA bring its libraries along, and the driver is the host's. TORCH_INDEX: another index to take
# torch from. Other packages come from what pip takes for its index.
ARG DEVICE=cpu
ARG TORCH_INDEX=
ARG EXTRAS=demo
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH

RUN useradd --create-home --uid 1000 user \
    && install --directory --owner user --group user /work /opt/venv /opt/hf_longctx
USER 1000
WORKDIR /opt/hf_longctx

# torch first and alone: what follows finds the build for this device already there. A change of our code repeats neither.
COPY --chown=user:user scripts/constraints.txt scripts/
RUN python -m venv /opt/venv \
    && case "$DEVICE" in \
        cpu) index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu} ;; \
        cuda) index=${TORCH_INDEX:-https://pypi.org/simple} ;; \
        *) echo "DEVICE is cpu or cuda, not $DEVICE" >&2; exit 2 ;; \
    esac \
    && pip install --constraint scripts/constraints.txt --index-url "$index" torch

COPY --chown=user:user pyproject.toml README.md LICENSE ./
COPY --chown=user:user hf_longctx hf_longctx
RUN pip install --constraint scripts/constraints.txt ".[$EXTRAS]"

COPY --chown=user:user scripts scripts
COPY --chown=user:user configs configs

WORKDIR /work
ENTRYPOINT ["hf-longctx"]
CMD ["--help"]
