"""Messages beside kernels, without a second GPU: a kernel of few blocks on a stream of its own stands for a message.

    wait      the attention kernel of a round is launched, then at once a small kernel on another stream, as NCCL's would be. How
              long the small one takes until it ends, over what attention takes alone: near 0 it runs beside it, 1 means after it
    hidden    a copy as large as a round's keys and values beside the same kernel: what share of it costs no time, 0 to 1

Both for streams of priority 0 and -1, and beside a spinning kernel of one block, which leaves the other multiprocessors free. On
a CPU there are no streams: the same calls run one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention_gpu import Setting, bare_call

from acceptance.record import Bench
from hf_longctx.layouts.blocks import Mask

PRIORITIES = (0, -1)
BLOCKS = (1, 8, 32)
ELEMENTS_PER_BLOCK = 512
"""Size of a block of torch's elementwise kernels in float32: 128 threads of 4."""


def measure(bench: Bench) -> None:
    """Attention of a round, and a spinning kernel, beside small kernels and a copy."""
    setting = Setting.on(bench.device, bench.tiny)
    tokens = 256 if bench.tiny else 16384
    inputs = setting.inputs(tokens)
    kernels: dict[str, Callable[[], Any]] = {
        "attention forward": bare_call(setting, inputs, backward=False, mask=Mask.FULL),
        "attention, both": bare_call(setting, inputs, backward=True, mask=Mask.FULL),
    }
    if bench.cuda:
        kernels["a spinning block"] = lambda: torch.cuda._sleep(20_000_000)
    arrived = torch.empty(2, *inputs[1].shape, dtype=inputs[1].dtype, device=bench.device)
    source = torch.randn_like(arrived)
    for name, kernel in kernels.items():
        for priority in PRIORITIES:
            beside = Beside(bench, kernel, priority)
            waits = {}
            for blocks in BLOCKS:
                small = torch.zeros(blocks * ELEMENTS_PER_BLOCK, device=bench.device)
                waits[blocks] = beside.wait(partial(small.add_, 1.0))
            hidden = beside.hidden(lambda: torch.add(source, 0.0, out=arrived))
            row = {"beside": name, "priority": str(priority)}
            row |= {f"wait of {blocks} blocks": f"{share:.2f}" for blocks, share in waits.items()}
            figures = {
                f"overlap/{name}/priority {priority}/wait": waits[8],
                f"overlap/{name}/priority {priority}/hidden": hidden,
            }
            bench.table("Beside a kernel", [row | {"copy hidden": f"{hidden:.2f}"}], figures)


class Beside:
    """Calls beside one kernel on a stream of a priority."""

    def __init__(self, bench: Bench, kernel: Callable[[], Any], priority: int) -> None:
        self._kernel, self._meter_device = kernel, bench.device
        self._stream = torch.cuda.Stream(bench.device, priority=priority) if bench.cuda else None
        for _ in range(2):
            kernel()

    def wait(self, call: Callable[[], Any], repeats: int = 5) -> float:
        """Time until `call` on the stream ends, begun together with the kernel, over the kernel's alone."""
        self._on_stream(call)
        alone = min(self._seconds(self._kernel) for _ in range(repeats))
        return min(self._until_done(call) for _ in range(repeats)) / alone

    def hidden(self, call: Callable[[], Any], repeats: int = 5) -> float:
        """Share of the shorter one of kernel and call that costs no time where both run together."""
        self._on_stream(call)
        kernel = min(self._seconds(self._kernel) for _ in range(repeats))
        copy = min(self._seconds(lambda: self._on_stream(call)) for _ in range(repeats))

        def both() -> None:
            self._kernel()
            self._on_stream(call, wait=False)

        together = min(self._seconds(both) for _ in range(repeats))
        return max(0.0, min(1.0, (kernel + copy - together) / min(kernel, copy)))

    def _on_stream(self, call: Callable[[], Any], wait: bool = True) -> None:
        """On the stream, after what was launched before if `wait`."""
        if self._stream is None:
            call()
            return
        if wait:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()

    def _seconds(self, call: Callable[[], Any]) -> float:
        """Until all streams are done."""
        with self._clock() as clock:
            call()
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
        return clock.seconds()

    def _until_done(self, call: Callable[[], Any]) -> float:
        """From before the kernel until `call`, launched after it on the stream, ends."""
        if self._stream is None:
            return self._seconds(lambda: (self._kernel(), call()))
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._stream.wait_event(begin)
        self._kernel()
        with torch.cuda.stream(self._stream):
            call()
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _clock(self) -> Any:
        return _Clock(self._stream is not None)


class _Clock(contextlib.AbstractContextManager["_Clock"]):
    """Times a block: events of the current stream on a GPU, a clock on a CPU."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda

    def __enter__(self) -> _Clock:
        import time

        self._now = time.perf_counter
        if self._cuda:
            torch.cuda.synchronize()
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._begun = self._now()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended = self._now()
        if self._cuda:
            self._events[1].record()

    def seconds(self) -> float:
        """Time of the block, once the device is done."""
        if not self._cuda:
            return self._ended - self._begun
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]) / 1e3)
