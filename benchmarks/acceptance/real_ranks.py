"""Ranks as processes: several that share one GPU, where NCCL's release lets them, and one on each of several GPUs.

    shared     two ranks on the first GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1; a release that does not know it refuses ("Duplicate
               GPU"). On a CPU: two ranks over gloo
    several    a rank on each GPU; none of them chooses a device, as under plain torchrun

All measure through the exchange that training uses: what it costs to begin, what messages take, what the host waits for.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_meter import Meter

from acceptance.record import Bench, NotPossibleError
from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange
from hf_longctx.commands.shared.ranks import start_ranks
from hf_longctx.layouts.layout import Layout, Segment, zigzag

TIMEOUT = timedelta(minutes=3)
"""The most that an operation between ranks may take: ranks that share a GPU may well hang."""
REFUSALS = ("Duplicate GPU", "duplicate gpu")
ROUNDS = 32
MESSAGE = {False: 2**26, True: 2**16}
"""Bytes, by whether shapes are tiny."""
WORST_ERROR = {"cuda": 2e-2, "cpu": 1e-5}
"""Largest error of attention over ranks, beside one rank's, in shares of the largest element: bfloat16 on a GPU, else float32."""

Figures = dict[str, float]


def shared(bench: Bench) -> None:
    """Two ranks on one device.

    Raises:
        NotPossibleError: NCCL refuses ranks that share a GPU.
    """
    try:
        of_ranks = launch(_on_shared, (bench.device.type, bench.tiny), 2)
    except Exception as error:
        if any(text in str(error) for text in REFUSALS):
            version = ".".join(map(str, torch.cuda.nccl.version()))
            raise NotPossibleError(f"NCCL {version} refuses two ranks on one GPU") from error
        raise
    tell(bench, "shared", of_ranks)


def several(bench: Bench) -> None:
    """A rank on each GPU.

    Raises:
        NotPossibleError: there are not two.
    """
    count = torch.cuda.device_count() if bench.cuda else 0
    if count < 2:
        raise NotPossibleError(f"it takes two GPUs, and {count} can be used here")
    of_ranks = launch(_on_its_own, (bench.tiny,), count)
    tell(bench, "several", of_ranks)
    devices = {figures["device"] for figures in of_ranks}
    row = {"ranks": str(count), "devices": str(len(devices))}
    bench.table("Exchange() where nobody chose a device", [row], {"several/devices over ranks": len(devices) / count})


def tell(bench: Bench, name: str, of_ranks: Sequence[Figures]) -> None:
    """Add what ranks measured: of each figure the largest, and of the bandwidth the least.

    Raises:
        RuntimeError: attention over ranks is not that of one rank.
    """
    figures = {
        key: (min if "GB per second" in key else max)(of_rank[key] for of_rank in of_ranks) for key in of_ranks[0]
    }
    rows = [{"figure": key, "value": f"{value:.4g}"} for key, value in figures.items()]
    bench.table("Over all ranks, the worst", rows, {f"{name}/{key}": value for key, value in figures.items()})
    if not figures["error of attention"] <= WORST_ERROR[bench.device.type]:
        raise RuntimeError(f"attention over {len(of_ranks)} ranks is wrong by {figures['error of attention']:.1e}")


def launch(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> list[Figures]:
    """Call `function(folder, *arguments)` on each of so many new processes; returns what each wrote."""
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(function, (folder, *arguments), ranks)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _on_shared(folder: str, device: str, tiny: bool) -> None:
    if device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        os.environ |= {"CUDA_VISIBLE_DEVICES": visible, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    else:
        torch.set_num_threads(1)
    _write(folder, device, tiny)


def _on_its_own(folder: str, tiny: bool) -> None:
    _write(folder, "cuda", tiny)


def _write(folder: str, device: str, tiny: bool) -> None:
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    figures = on_rank(device, tiny)
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def on_rank(kind: str, tiny: bool) -> Figures:
    """Measure on every rank of the default group together; returns what this rank saw."""
    cuda = kind == "cuda"
    local = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
    free = _free_bytes(local) if cuda else 0
    exchange = Exchange(TIMEOUT.total_seconds())
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    rank, world = exchange.rank, exchange.world_size
    size = MESSAGE[tiny]
    sent, arriving = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def message(into: torch.Tensor) -> Any:
        return exchange.start([(sent, (rank + 1) % world)], [(into, (rank - 1) % world)])

    def seconds() -> tuple[float, float]:
        """Time until the host may go on, and until the message is there."""
        dist.barrier()
        _synchronise(cuda)
        begun = time.perf_counter()
        message(arriving).wait()
        host = time.perf_counter() - begun
        _synchronise(cuda)
        return host, time.perf_counter() - begun

    (_, first), later = seconds(), [seconds() for _ in range(5)]
    whole = statistics.median(times[1] for times in later)
    figures = {
        "device": float(device.index or 0),
        "first message over later ones": first / whole,
        "share of a message that the host waits for": statistics.median(times[0] for times in later) / whole,
        "GB per second": size / whole / 1e9,
        "error of attention": _error(exchange, device, tiny),
    }
    if cuda:
        figures["GiB that NCCL takes"] = max(0.0, (free - _free_bytes(local)) / 2**30)
        figures["slices reserved by 32 rounds"] = _reserved(message, size, device)
    figures["products beside a receive that waits, over alone"] = _beside_a_receive(device, tiny)
    return figures


def _synchronise(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def _free_bytes(local: int) -> int:
    """Free bytes of a GPU, and those that torch has reserved there: others take what this lessens by."""
    return torch.cuda.mem_get_info(local)[0] + torch.cuda.memory_reserved(local)


def _reserved(message: Callable[[torch.Tensor], Any], size: int, device: torch.device) -> float:
    """Slices that the allocator reserves more for ROUNDS messages into new buffers, the host going on at once."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(ROUNDS):
        message(torch.empty(size, dtype=torch.uint8, device=device)).wait()
    reserved = torch.cuda.memory_reserved() - before
    torch.cuda.synchronize()
    return reserved / size


def _error(exchange: Exchange, device: torch.device, tiny: bool) -> float:
    """Error of attention over a document in zigzag, beside one rank with the whole document, in shares of the largest element."""
    tokens, heads, width = (256, 4, 16) if tiny else (8192, 16, 128)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, width, generator=generator).to(device, dtype) for _ in range(3))
    layout = Layout(zigzag(0, tokens, range(exchange.world_size)))
    rows = torch.cat([torch.arange(s.start, s.stop) for s in layout.shard(exchange.rank)]).to(device)
    ours = layout_attention(q[rows], k[rows], v[rows], layout, exchange)
    whole = layout_attention(q, k, v, Layout({0: (Segment(0, 0, tokens),)}))[rows]
    return float((ours - whole).abs().max() / whole.abs().max())


def _beside_a_receive(device: torch.device, tiny: bool) -> float:
    """Time of matrix products while a receive of the first rank waits for its message, over their time alone; 1 on others."""
    rank = dist.get_rank()
    group, store = dist.new_group([0, 1], timeout=TIMEOUT), dist.distributed_c10d._get_default_store()
    if rank > 1:
        return 1.0
    buffer, size = torch.zeros(1024, device=device), 256 if tiny else 8192
    works: list[Any] = [dist.irecv(buffer, 1, group=group) if rank == 0 else dist.isend(buffer, 0, group=group)]
    works[0].wait()  # the pair has met
    key, ratio = "products are done", 1.0
    if rank == 1:
        store.wait([key], TIMEOUT)
        works.append(dist.isend(buffer, 0, group=group))
    else:
        x = torch.randn(size, size, device=device)
        meter = Meter(device)
        alone = meter.medians({"x": lambda: x @ x}, 5)["x"]
        works.append(dist.irecv(buffer, 1, group=group))
        ratio = meter.medians({"x": lambda: x @ x}, 5)["x"] / alone
        store.set(key, "1")
    works[1].wait()
    return ratio
