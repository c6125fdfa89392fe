"""torch.cuda for one H100 that is not there: what this package, torch's FSDP2, transformers and accelerate ask it.

Streams and events order nothing here; who makes the *host* wait for the device is written down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, multi_processor_count=132, major=9, minor=0, gcnArchName=""
)

notice: Callable[[str], None] = lambda what: None  # noqa: E731
"""Called with what makes the host wait; watch.py sets it."""


class Stream:
    """A stream; all are alike."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = torch.device("cuda", 0), priority
        self.cuda_stream = self.stream_id = self.device_index = 0
        self.device_type = 1

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        notice("Stream.synchronize")

    def query(self) -> bool:
        return True


class Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None:
        notice("Event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0


@contextlib.contextmanager
def _entered(_: Any) -> Iterator[None]:
    yield


def install() -> None:
    """Put the stand-ins into torch.cuda, for as long as the process lives."""
    current = Stream()
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
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: current,
        "default_stream": lambda device=None: current,
        "set_stream": lambda stream: None,
        "stream": _entered,
        "synchronize": lambda device=None: notice("torch.cuda.synchronize"),
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
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]
    # Fake tensors would make one true allocation to initialise the device.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign, assignment]
