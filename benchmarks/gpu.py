"""Training at length on one GPU: the longest step that fits, tokens per second, MFU; a Llama of 8B, a Mixtral of 8x7B with LoRA.

    python benchmarks/gpu.py --part longest --json longest.json          # under 10 minutes each on an H200
    python benchmarks/gpu.py --part speed --json speed.json
    python benchmarks/gpu.py --part lora --json lora.json
    python benchmarks/gpu.py --part longest speed lora --device cpu --tiny

Random weights in bfloat16, patched by this package, with everything for length on: activation checkpointing that keeps
attention's output, MLPs in tiles, chunked loss, and for `longest` activations offloaded to host memory.

    longest   Llama, all layers, full fine-tuning: the most tokens whose forward and backward fit, by bisection. What decides
              is the tokens that a rank holds, not how they are cut into documents, so that probes are packs of documents of
              --pack tokens, which take little time; a single document is run beside one pack to show it. Optimizer states
              are counted, not allocated: --optimizer-bytes per parameter in host memory, which lessens what activations may
              use of it (--optimizer device: on the GPU). The optimizer's step itself is not run.
    speed     Llama, forward and backward of one document on a model of one layer and of --layers layers: the difference is the
              time of a layer, from which that of all layers is EXTRAPOLATED. MFU counts planner.cost.model_flops (causal
              attention, nothing that is recomputed) over the published peak of dense bfloat16 products. Nothing is offloaded,
              and the optimizer's step is not in it.
    lora      Mixtral with adapters in attention: the longest step that fits with all layers, and the same speeds.

Each result is printed, and written with --json, as soon as it is there. A part begins nothing that would, by what the last run
took, end after --minutes. Without a GPU it exits with 2, unless told to use the CPU.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from gpu_setting import NAMES, Setting, machine, setting_of
from report import parser

from hf_longctx import Layout, Segment
from hf_longctx.hardware.model_sizes import model_flops
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.training.memory.activations import ActivationMemory

NO_GPU = 2
"""Exit status where there is nothing to measure on."""
MARGIN = 0.9
"""Of the device: what offload is chosen for. The memory model is good to a tenth (estimate.py)."""
GROWTH = 1.25
"""Of the next probe where all have fitted."""


def pack(tokens: int, longest: int) -> Layout:
    """Documents of `longest` tokens, and one of what is left, on one rank."""
    cuts = [*range(0, tokens, longest), tokens]
    return Layout({0: tuple(Segment(i, 0, stop - start) for i, (start, stop) in enumerate(pairwise(cuts)))})


def step_of(model: Any, memory: ActivationMemory, layout: Layout, offload: float = 0.0) -> Callable[[], None]:
    """Forward and backward of one micro-batch; gradients of a step before are gone."""
    tokens = layout.tokens(0)
    device = memory.host.device
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with memory.micro_batch(layout, 0, offload):
            model(input_ids=ids, shift_labels=ids, layout=layout, num_items_in_batch=tokens).loss.backward()

    return step


@dataclass(frozen=True)
class Probe:
    """One try."""

    tokens: int
    offload: float
    fits: bool
    peak: int
    """bytes on the device, the model included; of what does not fit, as far as it came"""
    seconds: float
    host: int
    """bytes of activations that were in host memory"""


@dataclass(frozen=True)
class Budget:
    """What one model's steps may take."""

    predicted: MemoryModel
    held: int
    """bytes of the model itself"""
    room: int
    """bytes of the device"""
    host: int
    """bytes of the host, for activations"""

    @classmethod
    def of(cls, setting: Setting, kind: str, model: Any) -> "Budget":
        optimizer = setting.optimizer_bytes * trained_parameters(model)
        on_device, on_host = (0, optimizer) if setting.optimizer_on_host else (optimizer, 0)
        tensor_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        return cls(
            setting.memory_model(kind), tensor_bytes, setting.device_bytes - on_device, setting.host_bytes - on_host
        )

    def estimate(self, tokens: int, offload: float) -> int:
        return self.predicted.peak(tokens, round(1000 * offload)) - self.predicted.optimizer

    def offload(self, tokens: int) -> float:
        """Offload as little as the memory model says is needed, or as the host allows."""
        movable = max(1, self.predicted.offloadable_token_bytes * tokens)
        wanted = (self.estimate(tokens, 0.0) - MARGIN * self.room) / movable
        return max(0.0, min(1.0, wanted, self.host / movable))

    def likely(self, step: int) -> int:
        """The most tokens, a multiple of `step`, that should fit."""
        tokens = step
        while self.estimate(tokens + step, self.offload(tokens + step)) <= MARGIN * self.room:
            tokens += step
        return tokens


def trained_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def probe(
    setting: Setting,
    budget: Budget,
    model: Any,
    memory: ActivationMemory,
    layout: Layout,
    offload: float | None = None,
) -> Probe:
    """Runs a step of this layout; offload: what is moved to the host, None: as little as is needed."""
    model.zero_grad(set_to_none=True)  # gradients of a step before would count as held by the model
    tokens, moved, begin = layout.tokens(0), memory.host.bytes_to_host, time.monotonic()
    offload = budget.offload(tokens) if offload is None else offload
    try:
        peak = budget.held + setting.meter.peak_bytes(step_of(model, memory, layout, offload))
        fits = peak <= budget.room
    except torch.OutOfMemoryError:
        peak, fits = torch.cuda.max_memory_allocated(), False
    model.zero_grad(set_to_none=True)
    setting.clear()
    return Probe(tokens, offload, fits, peak, time.monotonic() - begin, memory.host.bytes_to_host - moved)


def longest(setting: Setting, kind: str) -> None:
    """Bisection that begins at what the memory model predicts."""
    model = setting.model(kind)
    memory = ActivationMemory(model, keep_attention="always", device=setting.device)
    budget, name = Budget.of(setting, kind, model), f"longest/{NAMES[kind]}"

    def tried(layout: Layout, what: str) -> Probe:
        trial = probe(setting, budget, model, memory, layout)
        setting.result(
            f"{name}/{what}",
            {
                "tokens": f"{trial.tokens}",
                "fits": "yes" if trial.fits else "no",
                "device GiB": f"{trial.peak / 2**30:.3f}",
                "estimated GiB": f"{budget.estimate(trial.tokens, trial.offload) / 2**30:.3f}",
                "offload": f"{trial.offload:.2f}",
                "host GiB": f"{trial.host / 2**30:.3f}",
                "seconds": f"{trial.seconds:.1f}",
            },
        )
        return trial

    step = setting.step
    tried(pack(step, step), "one document")
    first = tried(pack(step, min(step, setting.pack)), "as many tokens in a pack")
    low, high, per_token = (step if first.fits else 0), (0 if first.fits else step), first.seconds / step
    tokens = max(2 * step, budget.likely(step))
    while (high == 0 or high - low > step) and per_token * tokens < setting.left():
        trial = tried(pack(tokens, setting.pack), f"pack of {tokens}")
        if trial.fits:
            low, per_token = tokens, trial.seconds / tokens
        else:
            high = tokens
        middle = (low + high) // 2 if high else int(GROWTH * low)
        tokens = max(low + step, middle // step * step)
    setting.result(
        name,
        {
            "tokens that fit": f"{low}",
            "the least seen not to fit": f"{high or '-'}",
            "measured": "forward and backward, all layers",
            "counted, not allocated": f"optimizer, {setting.optimizer_bytes * trained_parameters(model) / 2**30:.2f} GiB on the "
            f"{'host' if setting.optimizer_on_host else 'device'}",
        },
    )


def speed(setting: Setting, kind: str) -> None:
    """Seconds of one layer, and of what is around the layers, at each length."""
    flops, every = model_flops(setting.config(kind)), setting.config(kind).num_hidden_layers
    name, last, before = f"speed/{NAMES[kind]}", 0.0, 1
    # Frozen weights have no gradients: of a matrix product's three, LoRA computes two.
    linear = flops.linear * 2 // 3 if kind == "mixtral" else flops.linear
    for tokens in setting.lengths:
        if last * (tokens / before) ** 2 > setting.left():  # attention grows so, and everything else more slowly
            print(f"{name}/{tokens}: no time is left in this part", flush=True)
            return
        begin = time.monotonic()
        seconds = [_seconds(setting, kind, layers, tokens) for layers in (1, setting.layers)]
        layer = (seconds[1] - seconds[0]) / (setting.layers - 1)
        whole = seconds[0] + layer * (every - 1)
        computed = linear * tokens + flops.attention * tokens**2
        figures = {
            "seconds of 1 layer": seconds[0],
            f"seconds of {setting.layers} layers": seconds[1],
            "extrapolated seconds of all layers": whole,
            "tokens per second": tokens / whole,
            "model FLOP per second": computed / whole,
        }
        row = {
            "tokens": str(tokens),
            "a layer, s": f"{layer:.3g}",
            f"all {every} layers, extrapolated, s": f"{whole:.4g}",
            "tokens/s": f"{tokens / whole:.4g}",
            "TFLOP/s": f"{computed / whole / 1e12:.3g}",
        }
        if setting.peak_flops is not None:
            figures["MFU"] = computed / whole / setting.peak_flops
            row["MFU"] = f"{figures['MFU']:.3f} of {setting.peak_flops / 1e12:.0f} TFLOP/s"
        setting.result(f"{name}/{tokens}", row, **figures)
        last, before = time.monotonic() - begin, tokens


def _seconds(setting: Setting, kind: str, layers: int, tokens: int) -> float:
    """Measure forward and backward of one document, after one of a few tokens."""
    model = setting.model(kind, layers)
    memory = ActivationMemory(model, keep_attention="always", device=setting.device)
    for warm_up in (min(tokens, setting.step), min(tokens, 2 * setting.step)):
        step_of(model, memory, pack(warm_up, warm_up))()
    seconds = setting.meter.seconds(step_of(model, memory, pack(tokens, tokens)))
    del model, memory
    setting.clear()
    return seconds


def lora(setting: Setting) -> None:
    """Speeds first: they are quick."""
    speed(setting, "mixtral")
    longest(setting, "mixtral")


PARTS: dict[str, Callable[[Setting], None]] = {
    "longest": lambda setting: longest(setting, "llama"),
    "speed": lambda setting: speed(setting, "llama"),
    "lora": lora,
}


def command_line() -> argparse.ArgumentParser:
    """Everything that may be asked for."""
    options = parser(__doc__)
    options.add_argument(
        "--part", nargs="+", choices=PARTS, default=list(PARTS), help="measure these parts (default: all)"
    )
    options.add_argument("--device", default="cuda", help="measure on this device (default: %(default)s)")
    options.add_argument("--tiny", action="store_true", help="use small models and lengths, to try this without a GPU")
    options.add_argument(
        "--tokens", type=int, nargs="+", help="measure speed on so many tokens (default: 32768, 131072 and 524288)"
    )
    options.add_argument(
        "--layers", type=int, default=3, help="measure speed with so many layers, beside 1 (default: %(default)s)"
    )
    options.add_argument(
        "--pack",
        type=int,
        default=32768,
        help="put documents of at most so many tokens into a pack (default: %(default)s)",
    )
    options.add_argument(
        "--minutes", type=float, default=9.0, help="end each part after so many minutes (default: %(default)s)"
    )
    options.add_argument(
        "--host-gib", type=float, help="use so much host memory (default: nine tenths of what is free)"
    )
    options.add_argument("--device-gib", type=float, help="use so much device memory (default: 97 %% of the device's)")
    options.add_argument(
        "--optimizer", choices=("host", "device"), default="host", help="say where the optimizer's states would be"
    )
    options.add_argument(
        "--optimizer-bytes",
        type=int,
        default=4,
        help="count so many bytes of states for a trained parameter; AdamW in bfloat16: 4",
    )
    options.add_argument(
        "--peak-tflops", type=float, help="take this peak for MFU (default: the published one of a known GPU)"
    )
    return options


def main() -> int:
    options = command_line()
    arguments = options.parse_args()
    if arguments.layers < 2:
        options.error(f"--layers {arguments.layers} must be 2 or more: the difference to one layer is measured")
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "gpu.py measures on a CUDA GPU, and torch sees none; --device cpu --tiny shows all of it", file=sys.stderr
        )
        return NO_GPU
    # Activations of changing sizes would leave holes that no other fits into.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    setting = setting_of(arguments, device)
    setting.results["machine"] = machine(setting, device)
    print(json.dumps(setting.results["machine"], indent=1), flush=True)
    for part in arguments.part:
        setting.begun = time.monotonic()
        PARTS[part](setting)
    return 0


if __name__ == "__main__":
    sys.exit(main())
