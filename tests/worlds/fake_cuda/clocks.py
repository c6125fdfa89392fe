"""Streams and events as vector clocks: which work of one stream is known to come after which work of another.

Each stream counts its accesses to memory. A clock says, for each stream, up to which access it has come: waiting for an event
joins its clock. The same is done by torch.cuda._sanitizer on a true device; here nothing runs, so that the order that the
program asks for is all there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

Clock = dict[int, int]
"""Stream -> the last of its accesses that comes before."""

notice: Callable[[str], None] = lambda what: None  # noqa: E731
"""Called with what makes the host wait; watch.py sets it."""
_numbers, _accesses = itertools.count(), itertools.count(1)


def join(clock: Clock, other: Clock) -> None:
    """Come after whatever the other comes after."""
    for stream, access in other.items():
        clock[stream] = max(clock.get(stream, 0), access)


class Stream:
    """A stream of a device."""

    every: list[Stream] = []  # noqa: RUF012
    """All that have been made: the host that waits for one lets none begin earlier."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = torch.device("cuda", 0), priority
        self.stream_id = self.cuda_stream = next(_numbers)
        self.device_index, self.device_type = 0, 1
        self.clock: Clock = {}
        Stream.every.append(self)

    def access(self) -> int:
        """Number the next access to memory, which comes after all before it."""
        self.clock[self.stream_id] = next(_accesses)
        return self.clock[self.stream_id]

    def wait_stream(self, stream: Stream) -> None:
        join(self.clock, stream.clock)

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        notice("Stream.synchronize")
        _host_waits(self.clock)

    def query(self) -> bool:
        return True


class Event:
    """A place in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or CURRENT[-1]).clock)

    def wait(self, stream: Stream | None = None) -> None:
        join((stream or CURRENT[-1]).clock, self.clock)

    def synchronize(self) -> None:
        notice("Event.synchronize")
        _host_waits(self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0


def _host_waits(clock: Clock) -> None:
    for stream in Stream.every:
        join(stream.clock, clock)


CURRENT = [Stream()]
"""The stream that operations go to, and those that were current before it."""


class entered:
    """torch.cuda.stream: within it, operations go to a stream."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        CURRENT.append(self.stream or CURRENT[-1])

    def __exit__(self, *error: Any) -> None:
        CURRENT.pop()
