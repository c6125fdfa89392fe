"""Devices and the nodes they come in: what their makers publish, what is achieved of it, and from both what a rank does per
second. Planner, trainer, simulator, estimates and MFU all take a device from here, by its name.

Three kinds of numbers, kept apart. Published ones (matmul_flops, bytes) are those of data sheets, one direction where a link
has two. Achieved shares are measurements of others, named where they stand. Latencies, and how attention slows down on short
blocks, are the GPU preset's (speeds.py). `speed()` multiplies; `from_profile` takes a machine as `hf-longctx
profile` measured it. Nothing is sent.

How the shares are found:

- attention: planner/cost/cost_model.py counts 2 forwards for a backward, flash attention computes 2.5 of them, because it
  computes the scores again. With forward at a share f and backward at b of the peak, 3 / (1/f + 2.5/b) of it is achieved.
- linear: the best matrix product is published (ML Engineering, S. Bekman: A100 87 %, H100 80 %, B200 78 %, GB200 73 %,
  MI300X 51 % of peak). ByteScale's MLP reaches 75 % on what fits an A100, 0.86 of its best; so do the others' here.
- links: rings of NCCL reach 78 to 82 % of NVLink inside a node (ML Engineering: 235 of 300 GB/s on A100, 367 of 450 on
  H200; DeepEP: 158 of 200 on H800), 43 to 47 of 50 GB/s between nodes (DeepEP, ConnectX-7).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hf_longctx.hardware.profile import Profile
from hf_longctx.hardware.speeds import CPU_CORES, GPU, CpuKind, RankSpeed

MIB, TIB = 2**20, 2**40
ADAM_BYTES = 28
"""Memory traffic of Adam per parameter, bfloat16 weights: reads a gradient (2), master weight and moments (12), writes these
and the weight (14)."""
MEMORY_SHARE = 0.8
"""Share of the published memory bandwidth that a fused optimizer achieves; kernels that stream reach 0.8 to 0.9."""

USUAL_KERNELS = ("flash_attn_2", "cuda_varlen")
"""Kernels that the presets' shares of the peak are of."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that are all alike; rank // ranks_per_node is a rank's node. A rank is one GPU or NPU."""

    name: str
    ranks_per_node: int
    device_bytes: int
    """memory of one rank's device"""
    host_bytes: int
    """memory of a node's CPUs"""
    matmul_flops: float
    """FLOP/s, published peak of dense bfloat16 products; what MFU is a share of"""
    memory_bandwidth: float
    """bytes/s, published, of the device's memory"""
    inside_bytes: float
    """bytes/s, published, that a rank receives from its node while it sends as much"""
    between_bytes: float
    """bytes/s, published, that a rank's share of the network cards receives while it sends as much"""
    nics_per_node: int
    host_bandwidth: float
    """bytes/s to host memory, and as much back, of one rank while all ranks of its node transfer; 0: unknown"""
    attention_share: float
    """of matmul_flops that attention achieves on long blocks, forward and backward, as planner/cost/cost_model.py counts its
    FLOPs"""
    linear_share: float
    """of matmul_flops that everything linear in the tokens achieves"""
    other_kernels: tuple[tuple[str, float], ...] = ()
    """kernels of attention other than flash-attention 2 -> the share that each achieves, where somebody has published it"""
    inside_share: float = 0.8
    """of inside_bytes that is achieved"""
    between_share: float = 0.88
    """of between_bytes that is achieved"""
    mesh_links: int = 1
    """links that inside_bytes is divided into where each pair of ranks has a link of its own; 1: a switch, which gives all of
    it to any pair"""
    measured: RankSpeed | None = None
    """of a machine that was measured: what `speed` returns"""

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "device_bytes", "host_bytes", "nics_per_node", "mesh_links"):
            if getattr(self, name) < 1:
                raise ValueError(f"Cluster.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("matmul_flops", "memory_bandwidth", "inside_bytes", "between_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Cluster.{name} is {getattr(self, name)}; it must be positive")
        for name in ("attention_share", "linear_share", "inside_share", "between_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"Cluster.{name} is {getattr(self, name)}; it must be a share of the peak, in (0, 1]")
        if self.host_bandwidth < 0:
            raise ValueError(f"Cluster.host_bandwidth is {self.host_bandwidth}; it must be 0 (unknown) or positive")

    @property
    def host_bytes_per_rank(self) -> int:
        return self.host_bytes // self.ranks_per_node

    def attending_by(self, kernel: str) -> Cluster:
        """Return the same machine with attention as fast as this kernel makes it. Raises ValueError where that is not known."""
        shares = dict(self.other_kernels) | (
            {} if self.measured else dict.fromkeys(USUAL_KERNELS, self.attention_share)
        )
        if kernel not in shares:
            valid = ", ".join(sorted(shares)) or "none, as a profile measured the kernel that ran"
            raise ValueError(
                f"the speed of attention by {kernel!r} on {self.name} is not known; valid: {valid}. `hf-longctx profile` on one "
                "such device measures what is installed there"
            )
        return replace(self, attention_share=shares[kernel])

    def speed(self) -> RankSpeed:
        """Give what one rank achieves, in bfloat16.

        Gradients are summed by NCCL's rings, which cross each network card of a node and its links at the same time: the
        slower of the two decides. Keys and values go from one rank to one other at a time, over one card or link.
        """
        if self.measured is not None:
            return self.measured
        inside, between = self.inside_bytes * self.inside_share, self.between_bytes * self.between_share
        return replace(
            GPU,
            attention_flops=self.matmul_flops * self.attention_share,
            linear_flops=self.matmul_flops * self.linear_share,
            inside_bytes=inside / self.mesh_links,
            between_bytes=between,
            reduce_bytes=min(inside, between * self.ranks_per_node),
            optimizer_parameters=self.memory_bandwidth * MEMORY_SHARE / ADAM_BYTES,
            activation_bytes=2,
        )


A100 = Cluster(
    name="a100",
    ranks_per_node=8,
    device_bytes=81920 * MIB,
    host_bytes=2 * TIB,
    matmul_flops=312e12,
    memory_bandwidth=2.039e12,
    inside_bytes=300e9,
    between_bytes=25e9,
    nics_per_node=8,
    host_bandwidth=10.3e9,
    attention_share=0.54,
    linear_share=0.75,
    between_share=0.9,
)
"""DGX A100: 8 A100 SXM of 80 GB, NVLink 3, 8 ConnectX-6 of 200 Gb/s (NVIDIA's data sheets). Two GPUs share a PCIe 4.0 x16
to the host, 16 GB/s each.

Achieved: ByteScale's case study (arXiv 2502.21231) of a 7B model in chunks of 8192 tokens fits this machine in every
number. MLP: 2.2e12 FLOPs in 9.5 ms, 75 % of peak (24 % of a Hopper's). Attention forward: 5.5e11 FLOPs, half a block, in
2.8 ms: 63 %, which is also what flash-attention 2 states for its backward (arXiv 2307.08691): 3 / (1/0.63 + 2.5/0.63)
= 54 %. Exchange, if there are 8 kv heads: 33.6 MB in 1.5 ms, 22.4 of 25 GB/s. Offload: 10.3 GB/s
(planner/memory/memory_model.py)."""

BYTESCALE = replace(A100, name="bytescale")
"""The cluster of ByteScale's experiments, as far as its case study tells: an A100 node (see A100)."""

H100 = Cluster(
    name="h100",
    ranks_per_node=8,
    device_bytes=81559 * MIB,
    host_bytes=2 * TIB,
    matmul_flops=989e12,
    memory_bandwidth=3.35e12,
    inside_bytes=450e9,
    between_bytes=50e9,
    nics_per_node=8,
    host_bandwidth=50e9,
    attention_share=0.29,
    linear_share=0.69,
    other_kernels=(("flash_attn_3", 0.51),),
)
"""DGX H100: 8 H100 SXM of 80 GB, NVLink 4, 8 ConnectX-7 of 400 Gb/s, PCIe 5.0 x16 for each GPU (NVIDIA's data sheets).

Achieved: attention is flash-attention 2, the kernel that this package runs: forward 370, backward 322 TFLOP/s at 16K
tokens and a head dimension of 128 (arXiv 2407.08608), so 287, 29 %; blocks of
512 tokens run at 70 % of that, and torch's own kernel is a copy of it. Flash-attention 3 does 648 and 561: 51 %. Host: 55 of
63 GB/s for one GPU (ML Engineering); 8 at once are an estimate."""

H800 = replace(H100, name="h800", inside_bytes=200e9)
"""An H100 with NVLink cut to 400 GB/s, both directions (DeepSeek-V3, arXiv 2412.19437; DeepEP measures 153 to 158 GB/s one
way). Everything else as there."""

H200 = replace(H100, name="h200", device_bytes=143771 * MIB, memory_bandwidth=4.8e12)
"""DGX H200: an H100 with 141 GB of faster memory (NVIDIA's data sheet)."""

B200 = replace(
    H100,
    name="b200",
    device_bytes=183359 * MIB,
    matmul_flops=2250e12,
    memory_bandwidth=8e12,
    inside_bytes=900e9,
    attention_share=0.2,
    linear_share=0.67,
    other_kernels=(),
)
"""DGX B200: 8 B200 of 180 GB, NVLink 5, 8 ConnectX-7 of 400 Gb/s, PCIe 5.0 x16 (NVIDIA's data sheets). The share of attention is
an estimate: kernels that were written for older tensor cores leave more of a faster peak unused."""

GB200 = replace(
    B200,
    name="gb200",
    ranks_per_node=72,
    device_bytes=189471 * MIB,
    host_bytes=36 * 480 * 10**9,
    matmul_flops=2500e12,
    linear_share=0.63,
    nics_per_node=72,
    host_bandwidth=100e9,
)
"""GB200 NVL72: a rack of 72 GPUs of 186 GB behind one NVLink switch, 2 of them on each Grace CPU with 480 GB, a 400 Gb/s card for
each (NVIDIA's data sheets). A node is what NVLink joins; launchers take its trays of 4 for nodes, unless `ranks_per_node` is 72.
The bandwidth to the host is an estimate: Grace's memory streams less than C2C carries for its two GPUs."""

L40S = Cluster(
    name="l40s",
    ranks_per_node=8,
    device_bytes=46068 * MIB,
    host_bytes=TIB,
    matmul_flops=362e12,
    memory_bandwidth=864e9,
    inside_bytes=32e9,
    between_bytes=12.5e9,
    nics_per_node=4,
    host_bandwidth=12e9,
    attention_share=0.35,
    linear_share=0.55,
    inside_share=0.6,
)
"""A server of 8 L40S of 48 GB, PCIe 4.0 x16 and no NVLink, 4 ConnectX-7 of 200 Gb/s (NVIDIA's data sheets). What is achieved, and
the bandwidth to the host, are estimates: 350 W hold less than the peak's clocks."""

RTX_4090 = replace(
    L40S,
    name="rtx-4090",
    device_bytes=24564 * MIB,
    host_bytes=TIB // 2,
    matmul_flops=165.2e12,
    memory_bandwidth=1.008e12,
    between_bytes=12.5e9 / 8,
    nics_per_node=1,
    attention_share=0.65,
    linear_share=0.8,
    inside_share=0.35,
)
"""A server of 8 GeForce RTX 4090 of 24 GB, PCIe 4.0 x16, one 100 Gb/s card (NVIDIA's Ada whitepaper, with float32 sums). GeForce
cards reach each other through host memory alone. What is achieved, and the server, are estimates."""

RTX_5090 = replace(
    RTX_4090,
    name="rtx-5090",
    device_bytes=32607 * MIB,
    matmul_flops=209.5e12,
    memory_bandwidth=1.792e12,
    inside_bytes=64e9,
    host_bandwidth=24e9,
)
"""The RTX 4090's server, with GeForce RTX 5090 of 32 GB and PCIe 5.0 (NVIDIA's Blackwell whitepaper)."""

MI300X = replace(
    H100,
    name="mi300x",
    device_bytes=196592 * MIB,
    matmul_flops=1307e12,
    memory_bandwidth=5.3e12,
    inside_bytes=448e9,
    attention_share=0.25,
    linear_share=0.44,
    other_kernels=(),
    mesh_links=7,
)
"""8 MI300X of 192 GB, a full mesh of 7 Infinity Fabric links of 64 GB/s one way, 8 cards of 400 Gb/s, PCIe 5.0 x16 (AMD's data
sheets). The share of attention is an estimate."""

ASCEND_910B = Cluster(
    name="ascend-910b",
    ranks_per_node=8,
    device_bytes=65536 * MIB,
    host_bytes=TIB,
    matmul_flops=313e12,
    memory_bandwidth=1.6e12,
    inside_bytes=196e9,
    between_bytes=25e9,
    nics_per_node=8,
    host_bandwidth=16e9,
    attention_share=0.45,
    linear_share=0.65,
    mesh_links=7,
)
"""Atlas 800T A2: 8 Ascend 910B3 of 64 GB, 313 TFLOP/s of float16 and bfloat16, HCCS of 392 GB/s in both directions as a
full mesh of 7 links, one 200 Gb/s RoCE port for each NPU (Huawei's product pages). A rank therefore exchanges keys and
values with one neighbour at 28 GB/s, and sums gradients over all links.

Achieved shares, host memory and host bandwidth are estimates; the shares lie around the 50 % MFU published for a dense
135B model on 8,192 NPUs (Pangu Ultra, arXiv 2504.07866)."""

CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (A100, H100, H800, H200, B200, GB200, L40S, RTX_4090, RTX_5090, MI300X, ASCEND_910B, BYTESCALE)
}
"""By name, for the command line."""
CPU_DEVICES: dict[str, CpuKind | None] = {"cpu": None} | {f"cpu-{kind}": kind for kind in CPU_CORES}
"""Names of --device for a rank on one core: this machine's processors, or those of a kind."""
KNOWN_DEVICES = (*CLUSTERS, *CPU_DEVICES)
"""All names of --device; a profile's file is the other way to name one."""

NAMED: tuple[tuple[str, Cluster], ...] = (
    (r"A100", A100),
    (r"H100", H100),
    (r"H800", H800),
    (r"H200", H200),
    (r"GB200", GB200),
    (r"B200", B200),
    (r"L40S", L40S),
    (r"RTX[ -]?4090", RTX_4090),
    (r"RTX[ -]?5090", RTX_5090),
    (r"MI300X", MI300X),
    (r"(Ascend[ -]?)?910B3?", ASCEND_910B),
)
"""Words in a device's name, as its driver gives it -> the machine that it belongs to."""
PART = r"MIG|Laptop|4090 D|5090 D|3090 Ti"
"""Marks the name of a part of a device, or of another one of nearly the same name, whose peak is not known here."""
OTHER_DEVICE = re.compile(rf"\b(PCIe|NVL|{PART})\b", re.IGNORECASE)
"""Marks names of devices that are not those of these machines: cards with slower clocks and without their links, and parts."""
OTHER_PEAKS = {
    "GH200": H200.matmul_flops,
    "H200 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H800 PCIe": 756e12,
    "H20": 148e12,
    "A100": A100.matmul_flops,
    "A800": A100.matmul_flops,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100S": 130e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "RTX 3090": 71e12,
}
"""Devices of which only the peak is known here: words in a name -> FLOP/s, dense products of half precision with float32 sums, as
their makers' data sheets publish them. The first name that fits counts."""


def preset_of(device: str | None) -> Cluster | None:
    """The preset of a device by its name: "NVIDIA H100 80GB HBM3" -> H100. None: none is known."""
    if device is None or OTHER_DEVICE.search(device):
        return None
    return next((cluster for word, cluster in NAMED if re.search(rf"\b{word}\b", device, re.IGNORECASE)), None)


def published_peak(device: str) -> float | None:
    """Return the FLOP/s of a device's data sheet, dense products of half precision, by its name; None: they are not known."""
    if (preset := preset_of(device)) is not None:
        return preset.matmul_flops
    if re.search(rf"\b({PART})\b", device, re.IGNORECASE):
        return None
    fitting = (peak for word, peak in OTHER_PEAKS.items() if re.search(rf"\b{word}\b", device, re.IGNORECASE))
    return next(fitting, None)


def read_cluster(name: str, option: str = "--device", also: Iterable[str] = ()) -> Cluster:
    """Return a preset by its name, or the machine that a profile's file describes.

    Args:
        option: of the command line, named in the error.
        also: other names that the option takes.

    Raises:
        ValueError: it is neither.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if not name.endswith(".json"):
        raise ValueError(
            f"{option} {name!r} is unknown; valid: {', '.join([*CLUSTERS, *also])}, or a .json file that `hf-longctx profile` "
            "wrote"
        )
    return from_profile(name)


def gpu_speed(device: str | None) -> RankSpeed:
    """Speeds that a device is planned with before it was measured: those of its preset, else an A100's."""
    return (preset_of(device) or A100).speed()


def said_of_speeds(device: str | None) -> str:
    """Name the speeds that a device is planned with."""
    preset = preset_of(device)
    if preset is not None:
        return f"planned with the speeds of {preset.name}{f' ({device})' if device != preset.name else ''}"
    return (
        f"planned with an A100's speeds, since those of {device or 'this device'} are not known (known: "
        f"{', '.join(cluster.name for _, cluster in NAMED)}): `hf-longctx profile` measures them, and "
        "LongContextPlugin(profile=...) or longctx.profile plans with them"
    )


def from_profile(path: str | Path) -> Cluster:
    """Return this machine, as `hf-longctx profile` measured it, and as many nodes of its kind as are wanted.

    MFU is a share of the published peak where the device's name is one of the presets', else of what its products achieve;
    so is the bandwidth to the host if it was not measured.

    Raises:
        CalibrationError: there is no such file, or it is no profile.
    """
    profile = Profile.load(path)
    speed = profile.speed
    preset = preset_of(profile.device)
    peak = published_peak(profile.device) or max(speed.linear_flops, speed.attention_flops)
    return Cluster(
        name=profile.device,
        ranks_per_node=profile.ranks_per_node,
        device_bytes=profile.device_bytes,
        host_bytes=profile.host_bytes,
        matmul_flops=peak,
        memory_bandwidth=speed.optimizer_parameters * ADAM_BYTES / MEMORY_SHARE,
        inside_bytes=speed.inside_bytes,
        between_bytes=speed.between_bytes,
        nics_per_node=preset.nics_per_node if preset is not None else 1,
        host_bandwidth=profile.host_bandwidth or (preset.host_bandwidth if preset is not None else 0.0),
        attention_share=min(1.0, speed.attention_flops / peak),
        linear_share=min(1.0, speed.linear_flops / peak),
        inside_share=1.0,
        between_share=1.0,
        measured=speed,
    )
