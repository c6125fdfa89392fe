"""The speed at which ranks send to each other: what `hf-longctx doctor` measures, through the exchange that training uses.

All ranks at once send to the rank t places on and receive from the one t places back, as the attention engine does: one short
message for the latency, one long for the bandwidth. Medians count. Sent: those messages, and each rank's times to all others.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_longctx.commands.preflight.health import Finding

SHORT_BYTES = 1024
LONG_BYTES = {"cuda": 2**28, "cpu": 2**25}
REPEATS = 5
MOST_DISTANCES = 8
UNEVEN = 0.5
"""A rank that receives at less than this share of the fastest one's speed is worth a word."""
EXPECTED_SHARE = 0.3
"""Share of the preset's rate for this device: below it, links that should be used are not."""


@dataclass(frozen=True)
class Link:
    """All ranks sending `distance` places on."""

    distance: int
    between_nodes: bool
    """whether any of them sends to another machine"""
    bandwidth: list[float]
    """bytes/s that each rank receives"""
    latency: list[float]
    """seconds of a short message, of each rank"""


def measure(device: Any, exchange: Any, path: Path) -> None:
    """Measure links, on every rank; the first one writes them (`read_links`)."""
    import torch
    import torch.distributed as dist

    rank, world = exchange.rank, exchange.world_size

    def seconds(size: int, distance: int) -> float:
        sent, arriving = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        times = []
        for _ in range(1 + REPEATS):
            dist.barrier()
            began = time.perf_counter()
            exchange.start([(sent, (rank + distance) % world)], [(arriving, (rank - distance) % world)]).wait()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])  # the first opens connections

    links = []
    for distance in range(1, min(world, MOST_DISTANCES + 1)):
        mine = torch.tensor([seconds(SHORT_BYTES, distance), seconds(LONG_BYTES[device.type], distance)], device=device)
        everyone = [torch.zeros_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        node = exchange.ranks_per_node
        links.append(
            Link(
                distance,
                any(sender // node != (sender + distance) % world // node for sender in range(world)),
                [LONG_BYTES[device.type] / float(rank_times[1]) for rank_times in everyone],
                [float(rank_times[0]) for rank_times in everyone],
            )
        )
    if rank == 0:
        path.write_text(json.dumps([asdict(link) for link in links]))


def read_links(path: Path) -> list[Link]:
    """Read what the first rank wrote."""
    return [Link(**link) for link in json.loads(path.read_text())]


def judged(links: list[Link], device: str) -> Iterator[Finding]:
    """One finding for each distance, and what is too slow for this device."""
    from hf_longctx.hardware.devices import preset_of

    preset = preset_of(device)
    for link in links:
        slowest, fastest = min(link.bandwidth), max(link.bandwidth)
        where = "partly between machines" if link.between_nodes else "inside one machine"
        text = (
            f"to the process {link.distance} on, {where}: {slowest / 1e9:.2f} to {fastest / 1e9:.2f} GB/s, "
            f"{max(link.latency) * 1e6:.0f} us"
        )
        usual = 0.0
        if preset is not None:
            usual = (
                preset.between_bytes * preset.between_share
                if link.between_nodes
                else preset.inside_bytes * preset.inside_share / preset.mesh_links
            )
        if slowest < EXPECTED_SHARE * usual:
            yield Finding(
                "warning",
                f"{text}; {preset.name if preset else ''} achieves {usual / 1e9:.0f} GB/s",
                "NCCL_DEBUG=INFO says which links it takes; see NCCL_P2P_DISABLE, NCCL_IB_DISABLE, nvidia-smi topo -m",
            )
        elif not link.between_nodes and slowest < UNEVEN * fastest:
            slow = link.bandwidth.index(slowest)
            yield Finding(
                "warning", f"{text}; process {slow} is the slowest", f"look at the device and links of process {slow}"
            )
        else:
            yield Finding("ok", text)
