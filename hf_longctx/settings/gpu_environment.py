"""Environment variables that runs on GPUs want, and that libraries read when they first use a GPU: set where nobody has set them
by whoever starts a run (hf_longctx/run.py), and looked at by `hf-longctx doctor`. The only place that names them."""

import ctypes
from collections.abc import Mapping, MutableMapping

GPU_ENVIRONMENT = {
    "NCCL_LAUNCH_ORDER_IMPLICIT": ("1", "communicators of a rank may not wait for each other in a circle"),
    "NCCL_NCHANNELS_PER_NET_PEER": ("4", "a message between two machines takes one channel of many otherwise"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("32", "compute, exchange, sharding and offload have streams of their own"),
    "PYTORCH_ALLOC_CONF": ("expandable_segments:True", "memory may fragment: micro-batches differ in length"),
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": (
        "1",
        "flash-attention 4 compiles its kernels in every process otherwise",
    ),
    "TORCH_GLOO_LAZY_INIT": ("1", "the group that ranks agree on checkpoints by connects each rank with every other"),
}
"""Name -> value, and what for. The first is NCCL's from 2.26 on: ranks start their operations in one order, and with it NCCL
keeps that order on the device. The second is what NCCL's maintainers name for messages between two ranks."""
OVERLAPPING_DRIVER = 12030
"""CUDA's driver (12.3) from which on NCCL keeps the order of operations and still runs them beside each other; with an older one
it runs one at a time (its guide, of NCCL_LAUNCH_ORDER_IMPLICIT)."""
OLDER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}


def lacking(variables: Mapping[str, str]) -> dict[str, str]:
    """Name -> value of what nobody has set."""
    return {
        name: value
        for name, (value, _) in GPU_ENVIRONMENT.items()
        if name not in variables and OLDER_NAMES.get(name, name) not in variables
    }


def cuda_driver() -> int | None:
    """Return CUDA's version of this machine's driver, 12030 for 12.3; None where torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(
        ctypes.byref(version)
    )  # torch has loaded it, and has no such function
    return version.value


def kernels_one_at_a_time(variables: Mapping[str, str], driver: int) -> bool:
    """Whether a GPU may run one kernel of NCCL's at a time, whatever streams they are on: then one that waits for its peer holds
    up all that were started after it. `driver`: CUDA's version, 12030 for 12.3."""
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return True
    return variables.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") != "0" and driver < OVERLAPPING_DRIVER


def set_for_gpus(variables: MutableMapping[str, str]) -> dict[str, str]:
    """Set what nobody has set; returns that."""
    added = lacking(variables)
    variables.update(added)
    return added


def hide_gpus(variables: MutableMapping[str, str]) -> None:
    """Hide GPUs from one of several ranks that compute on CPUs: accelerate's barrier would take one for each, which there may not
    be."""
    if int(variables.get("WORLD_SIZE", "1")) > 1:
        variables["CUDA_VISIBLE_DEVICES"] = ""
