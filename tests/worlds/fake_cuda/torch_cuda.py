"""torch.cuda for one H100 that is not there: what this package, torch's FSDP2, transformers and accelerate ask it.

Streams and events order what is asked of them (clocks.py), and who makes the *host* wait for the device is noted there.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from tests.worlds.fake_cuda import clocks

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, multi_processor_count=132, major=9, minor=0, gcnArchName=""
)


DRIVER = SimpleNamespace(cuDriverGetVersion=lambda version: setattr(version._obj, "value", 13000))
"""CUDA's own library, which is asked for the driver's version."""
PINNED: set[StorageWeakRef] = set()
"""Storages of pinned memory. The weak reference keeps another one from being taken for it."""


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy in pinned memory."""
    copied = tensor.clone()
    PINNED.add(StorageWeakRef(copied.untyped_storage()))
    return copied


@contextlib.contextmanager
def _entered(_: Any) -> Iterator[None]:
    yield


def install() -> None:
    """Put the stand-ins into torch.cuda, for as long as the process lives."""
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": _entered,
        "get_device_capability": lambda device=None: (H100.major, H100.minor),
        "get_device_name": lambda device=None: H100.name,
        "get_device_properties": lambda device=None: H100,
        "is_bf16_supported": lambda *_, **__: True,
        "Stream": clocks.Stream,
        "Event": clocks.Event,
        "current_stream": lambda device=None: clocks.CURRENT[-1],
        "default_stream": lambda device=None: clocks.CURRENT[0],
        "set_stream": lambda stream: None,
        "stream": clocks.entered,
        "synchronize": lambda device=None: clocks.notice("torch.cuda.synchronize"),
        "empty_cache": lambda: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (H100.total_memory, H100.total_memory),
    }
    for name, answer in answers.items():
        if not hasattr(torch.cuda, name):
            raise RuntimeError(f"torch {torch.__version__} has no torch.cuda.{name}: nobody would call its stand-in")
        setattr(torch.cuda, name, answer)
    library = ctypes.CDLL
    ctypes.CDLL = lambda name, *more, **named: DRIVER if name == "libcuda.so.1" else library(name, *more, **named)  # type: ignore[assignment, misc]
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]
    # Fake tensors would make one true allocation to initialise the device; a build for CUDA another one.
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign, assignment]
