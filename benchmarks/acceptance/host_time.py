"""The host's time and the device's for one layer's attention of one rank, forward and backward, by tokens per rank.

The rank holds its zigzag share of a document over RANKS ranks; copies on the device stand for messages (attention_gpu.Loopback).

    host      until the last call has returned, the device idle before: Python and launches
    device    between events around the same calls, launched while the device is held up by a spinning kernel: none of its gaps
              are the host's

Where the host takes longer than the device, a step is bound by the host. On a CPU both are one clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention_gpu import Loopback, Setting, both

from acceptance.record import Bench
from hf_longctx.attention.engine import layout_attention
from hf_longctx.layouts.layout import Layout, zigzag

RANKS = 8
LENGTHS = (2048, 4096, 8192, 16384)
TINY_LENGTHS = (128, 256)
CYCLES_PER_SECOND = 2e9
"""The clock of a GPU, at most: spinning for so many cycles takes a second or longer."""
SPIN_FACTOR = 2.0
"""The device is held up for so many times as long as the host takes."""


def measure(bench: Bench) -> None:
    """Measure length by length; say from where on the device takes longer."""
    setting = Setting.on(bench.device, bench.tiny, repeats=3)
    enough: int | None = None
    for tokens in TINY_LENGTHS if bench.tiny else LENGTHS:
        layout = Layout(zigzag(0, tokens * RANKS, range(RANKS)))
        exchange: Any = Loopback(RANKS)
        inputs = setting.inputs(layout.tokens(0))
        attend = partial(layout_attention, layout=layout, exchange=exchange)
        host, device = host_and_device(bench, partial(both, attend, *inputs), setting.repeats)
        ratio = host / device
        enough = tokens if enough is None and ratio < 1 else enough
        row = {
            "tokens per rank": str(tokens),
            "host, ms": f"{host * 1e3:.2f}",
            "device, ms": f"{device * 1e3:.2f}",
            "host / device": f"{ratio:.2f}",
            "host, ms a round": f"{host * 1e3 / RANKS:.2f}",
        }
        bench.table("One layer, forward and backward, over 8 ranks", [row], {f"host/{tokens} tokens per rank": ratio})
    if enough is not None:
        bench.table(
            "The host is quicker from",
            [{"tokens per rank": str(enough)}],
            {"host/tokens from which it is quicker": enough},
        )


def host_and_device(bench: Bench, call: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Seconds of the host and of the device, medians, after two calls that warm up."""
    if not bench.cuda:
        call()
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds), statistics.median(seconds)
    for _ in range(2):
        call()
    host, device = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        host.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(SPIN_FACTOR * host[-1] * CYCLES_PER_SECOND))
        begin.record()
        call()
        end.record()
        end.synchronize()
        device.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(host), statistics.median(device)
