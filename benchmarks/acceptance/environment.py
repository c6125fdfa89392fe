"""Versions, the GPUs, NCCL and the settings that its binding has, streams of the pool, and what `hf-longctx doctor` says."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

from acceptance import programs
from acceptance.record import Bench
from hf_longctx.settings.gpu_environment import set_for_gpus

PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "triton", "numpy", "hf_longctx"),
    *("flash-attn", "flash-attn-3", "flash_attn_3", "flash-attn-4", "liger-kernel", "bitsandbytes", "nvidia-nccl-cu13"),
)
CHANNELS_OF_A_PEER = ("n_channels_per_net_peer", "nchannels_per_net_peer", "max_p2p_peers")
"""Names under which NCCL's binding may offer the channels of a peer on another machine."""
WANTED = ("NCCL_LAUNCH_ORDER_IMPLICIT", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF")
"""Variables that a run is to set where nobody has."""
STREAMS = 100
"""Made to see after how many the pool hands out one again."""


def measure(bench: Bench) -> None:
    """Look at everything, and measure nothing that takes time."""
    bench.table("Versions", _versions())
    if bench.cuda:
        bench.table("GPUs", _gpus())
        handles = [torch.cuda.Stream().cuda_stream for _ in range(STREAMS)]
        again = len(set(handles))
        bench.table(
            "Streams",
            [{"asked for": str(STREAMS), "different ones": str(again)}],
            {"streams/different ones of 100": again},
        )
    _nccl(bench)
    variables: dict[str, str] = {}
    added = set_for_gpus(variables)
    lacking = [name for name in WANTED if name not in added]
    bench.table(
        "Variables that a run sets",
        [{"variable": name, "value": value} for name, value in added.items()],
        {"environment/wanted variables that a run does not set": len(lacking)},
    )
    code, output = programs.run_program("-m", "hf_longctx", "doctor", "--ranks", "1", seconds=max(60.0, bench.left()))
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    bench.table(
        "hf-longctx doctor",
        [{"says": line} for line in lines],
        {"environment/exit status of doctor": code, "environment/warnings of doctor": _count(lines, "warning")},
    )


def _versions() -> list[dict[str, str]]:
    rows = [{"package": "python", "version": sys.version.split()[0]}]
    for name in PACKAGES:
        try:
            rows.append({"package": name, "version": importlib.metadata.version(name)})
        except importlib.metadata.PackageNotFoundError:
            rows.append({"package": name, "version": "not installed"})
    rows.append({"package": "CUDA of torch", "version": str(torch.version.cuda)})
    rows.append({"package": "cuDNN", "version": str(torch.backends.cudnn.version())})
    return rows


def _gpus() -> list[dict[str, str]]:
    driver = "not known: there is no nvidia-smi"
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    rows = []
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        rows.append(
            {
                "GPU": str(number),
                "name": gpu.name,
                "GiB": f"{gpu.total_memory / 2**30:.1f}",
                "multiprocessors": str(gpu.multi_processor_count),
                "capability": f"{gpu.major}.{gpu.minor}",
                "driver": driver,
            }
        )
    return rows


def _nccl(bench: Bench) -> None:
    """NCCL's version, and the fields of its options that this torch can set."""
    options: Any = getattr(dist, "ProcessGroupNCCL", None)
    if options is None:
        bench.note("This torch is built without NCCL.")
        return
    if torch.cuda.is_available():
        bench.table("NCCL", [{"version": ".".join(map(str, torch.cuda.nccl.version()))}])
    config = options.Options().config
    fields = [name for name in dir(config) if not name.startswith("_") and not callable(getattr(config, name))]
    bench.table(
        "Fields of ProcessGroupNCCL.Options().config",
        [{"field": name, "default": str(getattr(config, name))} for name in fields],
        {"environment/fields for the channels of a peer": sum(name in fields for name in CHANNELS_OF_A_PEER)},
    )


def _count(lines: list[str], word: str) -> int:
    """The number before `word` in doctor's last line, "0 problem(s), 2 warning(s)"; without one, lines that begin with it."""
    for line in reversed(lines):
        if match := re.search(rf"(\d+) {word}", line):
            return int(match.group(1))
    return sum(line.startswith(word) for line in lines)
