"""Attention kernels and the engine on one GPU: throughput, overhead, packed documents, memory.

    python benchmarks/attention_gpu.py --json gpu.json                          # 10 minutes on an H100
    python benchmarks/attention_gpu.py --parts kernels --tokens 8192 32768
    python benchmarks/attention_gpu.py --device cpu --tiny                      # all of it without a GPU, small

bfloat16, 32 query heads, 8 key/value heads, head dimension 128, causal within documents. Calls that are compared are
interleaved, and medians reported (gpu_meter.py).

    kernels    one document: TFLOP/s, forward alone and forward with backward, of ours and of each package that can be
               imported (gpu_contenders.py), and their share of the best of these
    engine     one rank's part of a document split zigzag over several ranks (its own blocks, and those of the keys and
               values that it receives, which a copy on the device stands for), per pair of query and key, over one bare
               call of the same kernel with as many pairs: what slicing, merging and adding up cost
    packed     15 documents, and a GitHub-like pack: time of ours over each varlen function
    memory     the most that one layer holds beyond its inputs, and over that of half the tokens: 2 is linear

Without a GPU it says so and exits with 2, unless told to use the CPU.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attention_cases import github_like_lengths, packed_lengths
from gpu_contenders import BACKWARD, ONE_DOCUMENT, OURS, PACKED, Attention, Make, forward_flops, ours, pairs
from gpu_meter import Meter
from report import conclude, parser

from hf_longctx.attention.buffers import Buffers
from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.kernels import AttentionCall, RowSum, select_kernel
from hf_longctx.layouts.blocks import Block, Mask
from hf_longctx.layouts.exchange_schedule import schedule
from hf_longctx.layouts.layout import Layout, zigzag

NO_GPU = 2
"""Exit status where there is nothing to measure on."""

TOKENS = tuple(2**power for power in range(13, 20))
"""8K to 512K."""
PACK_TOKENS = 2**17
TINY_TOKENS = (1024, 2048)
RANKS = (4, 8)
ENGINE_TOKENS = 2**18

Row = dict[str, str]
Figures = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """Where and on what shapes is measured."""

    meter: Meter
    dtype: torch.dtype = torch.bfloat16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    repeats: int = 5

    @classmethod
    def on(cls, device: torch.device, tiny: bool, repeats: int = 5) -> "Setting":
        """The shapes of the module's docstring, or small ones in float32."""
        if tiny:
            return cls(Meter(device), torch.float32, heads=4, kv_heads=2, head_dim=16, repeats=repeats)
        return cls(Meter(device), repeats=repeats)

    def inputs(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """q [T, Hq, D], k and v [T, Hkv, D], which need gradients, and a gradient of the output [T, Hq, D]."""
        torch.manual_seed(0)
        q, grad_out, k, v = (
            torch.randn(tokens, heads, self.head_dim, dtype=self.dtype, device=self.meter.device)
            for heads in (self.heads, self.heads, self.kv_heads, self.kv_heads)
        )
        return *(x.requires_grad_() for x in (q, k, v)), grad_out

    def tflops(self, area: int, seconds: float, backward: bool) -> float:
        """TFLOP/s of a pass over `area` pairs."""
        return forward_flops(area, self.heads, self.head_dim) * (1 + BACKWARD * backward) / seconds / 1e12


def forward(attend: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor) -> None:
    """A forward pass that keeps nothing."""
    with torch.no_grad():
        attend(q, k, v)


def both(attend: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor) -> None:
    """Forward and backward."""
    torch.autograd.grad(attend(q, k, v), (q, k, v), grad_out)


def contend(
    setting: Setting, makes: dict[str, Make], lengths: tuple[int, ...]
) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """Contender -> seconds of forward, and of forward and backward; and of those that cannot, why."""
    inputs = setting.inputs(sum(lengths))
    able: dict[str, Attention] = {}
    unable: dict[str, str] = {}
    for name, make in makes.items():
        try:
            attend = make(lengths, setting.meter.device)
            both(attend, *inputs)
            able[name] = attend
        except Exception as error:
            if name == OURS:
                raise
            unable[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    seconds = [
        setting.meter.medians({name: call_of(run, attend, inputs) for name, attend in able.items()}, setting.repeats)
        for run in (forward, both)
    ]
    return {name: (seconds[0][name], seconds[1][name]) for name in able}, unable


def call_of(run: Callable[..., None], attend: Attention, inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    return lambda: run(attend, *inputs)


def kernels(setting: Setting, tokens: tuple[int, ...]) -> tuple[list[Row], Figures]:
    """Throughput on one document of each length."""
    rows: list[Row] = []
    figures: Figures = {}
    for length in tokens:
        seconds, unable = contend(setting, ONE_DOCUMENT, (length,))
        best = [min(times[backward] for times in seconds.values()) for backward in (0, 1)]
        for name in ONE_DOCUMENT:
            row = {"part": "kernels", "tokens": str(length), "kernel": name}
            for backward, label in enumerate(("forward", "forward and backward")):
                cells = ["-", "-"]
                if name in seconds:
                    tflops = setting.tflops(pairs((length,)), seconds[name][backward], bool(backward))
                    share = best[backward] / seconds[name][backward]
                    figures[f"kernels/{length} tokens/{name}/{label}, TFLOP per second"] = tflops
                    figures[f"kernels/{length} tokens/{name}/{label}, share of the best"] = share
                    cells = [f"{tflops:.3g}", f"{share:.2f}"]
                row |= {f"{label}: TFLOP/s": cells[0], f"share of the best, {label}": cells[1]}
            rows.append(row | {"remark": f"cannot: {unable[name]}" if name in unable else ""})
    return rows, figures


class Loopback:
    """An exchange without peers: what a rank receives is a copy of something that lies on the device already."""

    rank = 0
    bytes_sent = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = self.ranks_per_node = world_size
        self.buffers = Buffers()
        self._source: torch.Tensor | None = None

    def prepare(self, sends: Any, receives: Any, *, gradients: bool = False) -> Any:
        return receives

    def begin(self, receives: Any) -> "Loopback":
        for tensor, _ in receives:
            if self._source is None or self._source.numel() < tensor.numel():
                self._source = torch.randn(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            tensor.copy_(self._source[: tensor.numel()].view(tensor.shape))
        return self

    def wait(self) -> None:
        """Return at once: what was received is there already."""


def engine(setting: Setting, tokens: int, rank_counts: tuple[int, ...]) -> tuple[list[Row], Figures]:
    """Time per pair of rank 0's part of one document over that of one bare call with as many pairs."""
    rows: list[Row] = []
    figures: Figures = {}
    for ranks in rank_counts:
        layout = Layout(zigzag(0, tokens, range(ranks)))
        area = schedule(layout, 0).area
        equal = round((2 * area) ** 0.5)  # a causal block of so many rows has as many pairs
        inputs, bare_inputs = setting.inputs(layout.tokens(0)), setting.inputs(equal)
        exchange: Any = Loopback(ranks)

        def attend(q, k, v, layout=layout, exchange=exchange):
            return layout_attention(q, k, v, layout, exchange)

        for label, run, bare in (
            ("forward", forward, bare_call(setting, bare_inputs, backward=False)),
            ("forward and backward", both, bare_call(setting, bare_inputs, backward=True)),
        ):
            medians = setting.meter.medians({"engine": call_of(run, attend, inputs), "bare": bare}, setting.repeats)
            ratio = medians["engine"] / area / (medians["bare"] / pairs((equal,)))
            figures[f"engine/{ranks} ranks, {tokens} tokens/{label} over one bare call"] = ratio
            rows.append(
                {
                    "part": "engine",
                    "document": f"{tokens} tokens over {ranks} ranks",
                    "pass": label,
                    "time per pair / one bare call's": f"{ratio:.3f}",
                    "milliseconds": f"{medians['engine'] * 1e3:.1f}",
                    "rows of the bare call": str(equal),
                }
            )
    return rows, figures


def bare_call(
    setting: Setting, inputs: tuple[torch.Tensor, ...], *, backward: bool, mask: Mask = Mask.CAUSAL
) -> Callable[[], None]:
    """The kernel that the engine would choose, called once for a block of all rows of q and of k."""
    q, k, v, grad_out = (x.detach() for x in inputs)
    call = AttentionCall(q, k, v, (Block(0, len(q), 0, len(k), mask),), setting.head_dim**-0.5)
    kernel = select_kernel(call)

    def run() -> None:
        (partial,) = kernel.forward(call)
        if backward:
            kernel.backward(call, grad_out, partial.out, partial.lse, (RowSum(q), RowSum(k), RowSum(v)))

    return run


def packed(setting: Setting, tokens: int) -> tuple[list[Row], Figures]:
    """Packed documents, against functions that take boundaries."""
    rows: list[Row] = []
    figures: Figures = {}
    for case, lengths in (("15 documents", packed_lengths(tokens, 1)), ("GitHub-like", github_like_lengths(tokens))):
        seconds, unable = contend(setting, PACKED, lengths)
        for name in PACKED:
            row = {"part": "packed", "documents": case, "number": str(len(lengths)), "function": name}
            for backward, label in enumerate(("forward", "forward and backward")):
                cells = ["-", "-"]
                if name in seconds:
                    tflops = setting.tflops(pairs(lengths), seconds[name][backward], bool(backward))
                    ratio = seconds[OURS][backward] / seconds[name][backward]
                    figures[f"packed/{case}/{name}/{label}, TFLOP per second"] = tflops
                    figures[f"packed/{case}/{name}/{label}, time of ours over this"] = ratio
                    cells = [f"{ratio:.2f}", f"{tflops:.3g}"]
                row |= {f"time of ours / this, {label}": cells[0], f"TFLOP/s, {label}": cells[1]}
            rows.append(row | {"remark": f"cannot: {unable[name]}" if name in unable else ""})
    return rows, figures


def memory(setting: Setting, tokens: tuple[int, ...]) -> tuple[list[Row], Figures]:
    """Peak of ours, forward and backward over one document, beyond the inputs."""
    rows: list[Row] = []
    figures: Figures = {}
    before: tuple[int, int] | None = None
    for length in tokens:
        inputs = setting.inputs(length)
        run = call_of(both, ours((length,), setting.meter.device), inputs)
        run()
        peak = setting.meter.peak_bytes(run)
        row = {"part": "memory", "tokens": str(length), "peak MiB": f"{peak / 2**20:.0f}", "/ half the tokens": "-"}
        figures[f"memory/peak bytes of {length} tokens"] = peak
        if before is not None and before[0] * 2 == length:
            figures[f"memory/{length} over {before[0]} tokens"] = peak / before[1]
            row["/ half the tokens"] = f"{peak / before[1]:.2f}"
        rows.append(row)
        before = (length, peak)
    return rows, figures


PARTS: dict[str, Callable[[Setting, tuple[int, ...]], tuple[list[Row], Figures]]] = {
    "kernels": kernels,
    "engine": lambda setting, tokens: engine(setting, min(ENGINE_TOKENS, max(tokens)), RANKS),
    "packed": lambda setting, tokens: packed(setting, min(PACK_TOKENS, max(tokens))),
    "memory": memory,
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="measure these parts (default: all)"
    )
    options.add_argument("--device", default="cuda", help="measure on this device (default: %(default)s)")
    options.add_argument("--tiny", action="store_true", help="use small shapes and lengths, to try this without a GPU")
    options.add_argument(
        "--tokens", type=int, nargs="+", help="measure documents of so many tokens (default: 8192 to 524288)"
    )
    options.add_argument(
        "--repeats", type=int, default=5, help="take the median of so many runs (default: %(default)s)"
    )
    arguments = options.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "attention_gpu.py measures on a CUDA GPU, and torch sees none; --device cpu --tiny shows all of it, and "
            "attention.py needs none",
            file=sys.stderr,
        )
        return NO_GPU
    load = os.getloadavg()[0]
    setting = Setting.on(device, arguments.tiny, arguments.repeats)
    tokens = tuple(sorted(arguments.tokens or (TINY_TOKENS if arguments.tiny else TOKENS)))
    rows: list[Row] = []
    figures: Figures = {}
    for part in arguments.parts:
        part_rows, part_figures = PARTS[part](setting, tokens)
        rows += part_rows
        figures |= part_figures
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    gpu = {"name": name, "CUDA": torch.version.cuda}
    return conclude(arguments, rows, figures, load, section="part", gpu=gpu)


if __name__ == "__main__":
    sys.exit(main())
