"""bfloat16 or float32: which of the two a device computes faster in. What `auto` means wherever it can be said.

    a live run, doctor, profile, config, evaluate, generate    decide_here: this machine; on a CPU, matrix products are timed
    train --dry-run without --device, where there are GPUs     decide_here: they are not timed
    train --dry-run otherwise, estimate, init, plan            decide_for: a device by its name; nothing is timed

bfloat16 is taken where it is at least FASTER times as fast, else float32, which is also the more exact. On CUDA the compute
capability decides: tensor cores multiply bfloat16 from 8.0 on. On CPUs, flags alone would be wrong: one core of a Xeon with
AVX512-BF16 and without AMX runs 1024 x 576 x 1536 products at 140 GFLOP/s in float32 and at 81 in bfloat16. So the three
products of a linear layer (forward, and the gradients of its input and of its weight) are run in turn in both precisions.
They are timed in CPU seconds: beside eight busy processes on two cores the ratio of these stayed between 0.57 and 0.61
where wall-clock times were off by 3 to 30 times. One thread runs them: several wait for each other in CPU seconds (seen with
two on a busy machine: a ratio of 1.08 instead of 0.6).

Ranks must decide alike: `from_first_rank` makes the first one's answer everyone's. torch is imported where it is needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from hf_longctx.counting.config_fields import field_values
from hf_longctx.hardware.devices import A100, CPU_DEVICES, gpu_speed, preset_of
from hf_longctx.hardware.profile import Profile
from hf_longctx.hardware.speeds import CPU_CORES, CpuKind, RankSpeed

if TYPE_CHECKING:
    import torch

AUTO = "auto"
"""Value of training.bf16."""
FASTER = 1.15
"""bfloat16 must be so many times as fast as float32: a tie is not worth its rounding, nor the casts of autocast."""
MUCH_SLOWER = 1.5
"""A precision that somebody chose is worth a word where the other one is so many times as fast."""
CAPABILITY = (8, 0)
"""CUDA's, from which on tensor cores multiply bfloat16."""
CPUINFO = Path("/proc/cpuinfo")
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Keep oneDNN, which multiplies bfloat16 for torch, to older instructions. ATEN_CPU_CAPABILITY does not change these products
(measured: avx2 beside AVX512-BF16 leaves 55 to 62 GFLOP/s, ONEDNN_MAX_CPU_ISA=AVX2 leaves 3.7)."""
TOKENS, MOST_HIDDEN, MOST_INTERMEDIATE = 64, 384, 768
"""Largest products that are timed: 1 ms in float32 and up to 20 in bfloat16; larger ones have the same ratio within 0.1."""
TYPICAL = (TOKENS, MOST_HIDDEN, MOST_INTERMEDIATE)
LEAST_FLOPS = 2e7
"""FLOPs of one sample: smaller products run several times in a row, so that clocks do not count."""
ROUNDS = 5
"""Rounds, of which the fastest counts, after one that loads kernels: whatever else runs makes a product slower, never faster."""

Value = TypeVar("Value")
WeightsDtype = Literal["float32", "bfloat16", "float16"]
"""Values of model.dtype."""


@dataclass(frozen=True)
class Decision:
    """The precision of a run, and the reason for it."""

    bf16: bool
    """whether autocast is on, as TrainingArguments.bf16"""
    reason: str
    kept: bool = False
    """from a checkpoint: as the run began, be it fast here or not"""
    weights: WeightsDtype = "float32"
    """of the model; without autocast, products are computed in it"""

    @property
    def computes(self) -> WeightsDtype:
        return "bfloat16" if self.bf16 else self.weights

    @property
    def mixed(self) -> Literal["bf16", "no"]:
        """TrainingArguments' mixed_precision."""
        return "bf16" if self.bf16 else "no"

    def over(self, weights: WeightsDtype) -> Decision:
        """Say what a model with such weights computes in. `auto` leaves them as they are (model.dtype): where float32 is the
        faster one there is no autocast, and products of half-precision weights are in half precision all the same."""
        if self.bf16 or weights == "float32":
            return replace(self, weights=weights)
        return replace(self, weights=weights, reason=f"the weights are {weights}, and no autocast is on: {self.reason}")

    def __str__(self) -> str:
        return f"{self.computes}: {self.reason}"


class Rates(NamedTuple):
    """FLOP/s of matrix products on one core."""

    bfloat16: float
    float32: float

    @property
    def ratio(self) -> float:
        """Speed of bfloat16 over that of float32."""
        return self.bfloat16 / self.float32

    def __str__(self) -> str:
        return f"{self.bfloat16 / 1e9:.3g} GFLOP/s a core in bfloat16 and {self.float32 / 1e9:.3g} in float32"


def cpu_kind(cpuinfo: str | None = None, environ: Mapping[str, str] = os.environ) -> CpuKind:
    """Return what this machine's processors, or those of a /proc/cpuinfo, multiply bfloat16 with, as far as oneDNN may use it."""
    if cpuinfo is None:
        cpuinfo = CPUINFO.read_text() if CPUINFO.is_file() else ""
    flags = set(next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "").split())
    isa = next((environ[name].upper() for name in ISA_VARIABLES if environ.get(name)), "ALL")
    if isa.startswith(("SSE", "AVX2")) or isa == "AVX" or "avx512f" not in flags:
        return "none"
    if isa in ("AVX512_CORE", "AVX512_CORE_VNNI") or "avx512_bf16" not in flags:
        return "avx512"
    dot_products_at_most = isa.startswith("AVX") and "AMX" not in isa
    return "amx" if "amx_bf16" in flags and not dot_products_at_most else "avx512_bf16"


def cpu_core(kind: CpuKind, bf16: bool) -> RankSpeed:
    """Speeds of a rank on one core. All ranks of a run must ask for the same kind."""
    return CPU_CORES[kind]["bfloat16" if bf16 else "float32"]


def preset_speed(cpu: CpuKind | None, gpu: str | None, half: bool) -> RankSpeed:
    """Return the speeds by which a rank is planned before it was measured. All ranks of a run must ask for the same.

    Args:
        cpu: kind of the core that computes; None: a GPU does.
        gpu: its name, as `gpu_speed` takes it.
        half: whether it computes in half precision.
    """
    if cpu is not None:
        return cpu_core(cpu, half)
    return gpu_speed(gpu) if half else replace(gpu_speed(gpu), activation_bytes=4)


def preset_name(device: torch.device) -> str:
    """Name the preset by which a rank on this device is planned: one of hardware/devices.py's KNOWN_DEVICES."""
    import torch

    if device.type == "cpu":
        return f"cpu-{cpu_kind()}"
    preset = preset_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return (preset or A100).name


def kind_of(device: str) -> CpuKind:
    """The kind of a name in CPU_DEVICES."""
    return CPU_DEVICES[device] or cpu_kind()


def decide_for(device: str) -> Decision:
    """Return what a device that need not be here computes faster in, by its name: one of CPU_DEVICES, a profile's file, or a GPU
    or NPU of hardware/devices.py, which all multiply bfloat16. Nothing is timed.

    Raises:
        CalibrationError: the profile cannot be read.
    """
    if device in CPU_DEVICES:
        kind = kind_of(device)
        rates = Rates(*(CPU_CORES[kind][name].linear_flops for name in ("bfloat16", "float32")))
        return Decision(rates.ratio >= FASTER, f"CPUs with {_instructions(kind)} do {rates}")
    if device.endswith(".json"):
        precision = Profile.load(device).precision
        return Decision(precision != "float32", f"{device} was measured in {precision}")
    return Decision(True, f"{device} multiplies bfloat16 faster")


def decide_here(
    device: torch.device, shape: tuple[int, int, int] = TYPICAL, rates_of: Callable[..., Rates] | None = None
) -> Decision:
    """Return what a device of this machine computes faster in.

    Args:
        shape: of the products that are timed on a CPU; see `product_shape`.
        rates_of: what times them, `product_rates`.
    """
    if device.type == "cuda":
        import torch

        capability = torch.cuda.get_device_capability(device)
        text = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        return Decision(capability >= CAPABILITY, f"{text}, and bfloat16 is fast from {'{}.{}'.format(*CAPABILITY)} on")
    if device.type != "cpu":
        return Decision(False, f"whether bfloat16 is fast on {device.type} is not known")
    rates = (rates_of or product_rates)(shape)
    return Decision(
        rates.ratio >= FASTER,
        f"a CPU with {_instructions(cpu_kind())} does {rates} ({rates.ratio:.2f} times; bfloat16 from {FASTER} on)",
    )


def _instructions(kind: CpuKind) -> str:
    return {
        "amx": "AMX",
        "avx512_bf16": "AVX512-BF16 and without AMX",
        "avx512": "AVX-512 and without AVX512-BF16",
        "none": "no instructions for bfloat16",
    }[kind]


def product_shape(config: Any) -> tuple[int, int, int]:
    """(tokens, hidden, intermediate) of products like those of a model, none larger than TYPICAL."""
    hidden = max(field_values(config, "hidden_size"), default=0) or MOST_HIDDEN
    intermediate = max(field_values(config, "intermediate_size"), default=0) or 4 * hidden
    return TOKENS, min(hidden, MOST_HIDDEN), min(intermediate, MOST_INTERMEDIATE)


def product_rates(shape: tuple[int, int, int], clock: Callable[[], float] = time.thread_time) -> Rates:
    """Times the three products of a linear layer [hidden -> intermediate] on so many tokens, in both precisions in turn. They run
    on this thread, whose CPU seconds count: other threads of a rank that starts are busy too.

    Draws no random number: a run's are those of its seed, whatever is timed.
    """
    import torch

    tokens, hidden, intermediate = shape
    flops = 6 * tokens * hidden * intermediate
    repeats = max(1, round(LEAST_FLOPS / flops))

    def products(x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        for _ in range(repeats):
            torch.mm(x, weight.T)
            torch.mm(gradient, weight)
            torch.mm(gradient.T, x)

    runs: list[Callable[[], None]] = []
    for dtype in (torch.bfloat16, torch.float32):
        sizes = ((tokens, hidden), (intermediate, hidden), (tokens, intermediate))
        runs.append(partial(products, *(torch.ones(size, dtype=dtype, device="cpu") for size in sizes)))
    seconds: list[list[float]] = [[], []]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for _ in range(1 + ROUNDS):
                for times, run in zip(seconds, runs):
                    began = clock()
                    run()
                    times.append(clock() - began)
    finally:
        torch.set_num_threads(threads)
    return Rates(*(repeats * flops / max(min(times[1:]), 1e-9) for times in seconds))


def with_precision(training: dict[str, Any], decide: Callable[[], Decision]) -> tuple[dict[str, Any], Decision | None]:
    """A section `training` in which bf16 is true or false, and what was decided; None: the file says it itself."""
    if training.get("bf16") != AUTO:
        return training, None
    decision = decide()
    return training | {"bf16": decision.bf16}, decision


def from_first_rank(make: Callable[[], Value]) -> Value:
    """Return what `make` returns on rank 0, on every rank of the default process group; without one, here. Collective."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    told: list[Any] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    return told[0]
