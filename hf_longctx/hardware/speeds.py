"""Speeds of a rank: what it achieves per second, as the cost model takes it (planner/cost/cost_model.py). CPU cores by what
they multiply bfloat16 with, and a GPU of A100's class. devices.py makes those of other GPUs from what their makers publish.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """Speeds that one rank achieves: `hf-longctx profile` measures them, hardware/devices.py has those of machines elsewhere."""

    attention_flops: float
    """FLOP/s of the attention kernel on long blocks, forward and backward."""
    linear_flops: float
    """FLOP/s of matrix multiplications, forward and backward."""
    inside_bytes: float
    """Bytes/s that one rank receives from ranks of its own node while it also sends."""
    between_bytes: float
    """Bytes/s that one rank receives from other nodes while it also sends."""
    message_seconds: float
    """Seconds per layer to exchange with one more rank, however little."""
    document_seconds: float
    """Seconds per layer that one more document costs each of its ranks, however short."""
    micro_batch_seconds: float
    """Seconds per layer that one more micro-batch costs, however little it holds."""
    attention_half_tokens: float
    """Tokens per block at which attention runs at half its speed on long ones."""
    reduce_bytes: float
    """Bytes/s of gradients that one rank sums with all others."""
    optimizer_parameters: float
    """Parameters/s that one rank updates."""
    activation_bytes: int
    """Bytes of one activation element: 2 for bfloat16, 4 for float32."""
    launch_seconds: float = 0.0
    """Seconds per layer in which the host starts the kernels of a micro-batch, forward and backward: a GPU that computes longer
    hides them, and none is done sooner. 0: unknown, or there is no device beside the host. Of plans, each micro-batch costs what
    one that is full does not hide."""


CpuKind = Literal["amx", "avx512_bf16", "avx512", "none"]
"""Instructions that a CPU multiplies bfloat16 with: tiles, AVX-512's dot products, or what it has for float32."""
Computes = Literal["bfloat16", "float32"]
"""Dtype that matrix products are computed in."""


def product_scratch(kind: CpuKind | None, bf16: bool) -> int:
    """Return the bytes that a product takes beside each element of its result: 4 of products in bfloat16 on CPUs with AVX-512 and
    without its bfloat16 instructions. There oneDNN sums the product in float32, in memory of its own, and then casts it
    (counted with torch 2.13: 128 + 4 * rows * columns bytes for each product; 75 to 200 KB where the CPU has them, whatever
    the tokens). On CPUs that stop at AVX2, torch multiplies by itself.

    Args:
        kind: None: the device is no CPU.
        bf16: whether products are in bfloat16.
    """
    return 4 if kind == "avx512" and bf16 else 0


CPU_CORE = RankSpeed(
    attention_flops=5.4e10,
    linear_flops=2.6e11,
    inside_bytes=1.0e9,
    between_bytes=1.0e9,
    message_seconds=1e-3,
    document_seconds=1e-3,
    micro_batch_seconds=0.0,
    attention_half_tokens=0.0,
    reduce_bytes=5e8,
    optimizer_parameters=1e8,
    activation_bytes=2,
)
"""A rank on one CPU core with AMX, gloo, bfloat16. Compute is fitted to SmolLM2-135M, forward and backward on two cores: 393
tokens/s in documents of 1024 tokens, 181 in 4096. Measured between two processes: 0.9 GB/s at 4 MiB each way, 0.34 ms
per message, of which an exchange has three per layer. The last two rates are estimates."""

_FLOAT32_CORE = replace(CPU_CORE, document_seconds=1e-4, activation_bytes=4)
CPU_CORES: dict[CpuKind, dict[Computes, RankSpeed]] = {
    "amx": {"bfloat16": CPU_CORE, "float32": replace(_FLOAT32_CORE, linear_flops=5.7e10)},
    "avx512_bf16": {
        "bfloat16": replace(CPU_CORE, linear_flops=5.0e10, attention_flops=5.9e10),
        "float32": replace(_FLOAT32_CORE, linear_flops=8.3e10, attention_flops=6.7e10),
    },
    "avx512": {
        "bfloat16": replace(CPU_CORE, linear_flops=2.3e10, attention_flops=6.0e10),
        "float32": replace(_FLOAT32_CORE, linear_flops=8.3e10, attention_flops=6.7e10),
    },
    "none": {
        "bfloat16": replace(CPU_CORE, linear_flops=1.2e9, attention_flops=4.3e10),
        "float32": replace(_FLOAT32_CORE, linear_flops=5.4e10, attention_flops=4.5e10),
    },
}
"""A rank on one core of each kind of CPU. amx in float32: 330 microseconds per token of a Llama with 4 layers of 256, forward
and backward on one thread, documents of 256 to 2048 tokens. The others: CPU seconds of 3 layers of SmolLM2-135M and its head,
512 tokens, and of attention alone, 2048 tokens, on a Xeon with AVX512-BF16 and without AMX; avx512: the same Xeon with
ONEDNN_MAX_CPU_ISA=AVX512_CORE, whose bare products (24 GFLOP/s in bfloat16) are those of a Xeon that has no more; none: with
oneDNN, MKL and ATen kept to AVX2."""

GPU = RankSpeed(
    attention_flops=1.68e14,
    linear_flops=2.3e14,
    inside_bytes=1.6e11,
    between_bytes=2.2e10,
    message_seconds=5e-4,
    document_seconds=1e-5,
    micro_batch_seconds=3e-4,
    attention_half_tokens=256.0,
    reduce_bytes=1.8e11,
    optimizer_parameters=5e10,
    activation_bytes=2,
)
"""A rank on one A100-class GPU with its own network card. From ByteScale's case study of a 7B model in chunks of 8192
tokens: MLP 9.5 ms; attention 2.8 ms forward and exchange 1.5 ms per ring step (a flash backward computes 2.5 forwards'
worth). Links inside a node are 7 times as fast, and gradients are summed by rings over all of a node's cards; seconds,
half_tokens and the optimizer's rate are estimates. hardware/devices.py has other GPUs.

One more rank costs half a millisecond a layer until a profile knows better: the host launches a round's kernels and its batch of
messages, forward, again and backward (with kernels that do nothing, 0.35 to 0.57 ms forward and 1.2 to 2.0 backward of a busy
Xeon core, half of it on a good host), and waits for whom it has not met before. With 30 microseconds, what links alone take,
documents were spread over so many ranks that launches decided how long they took."""
