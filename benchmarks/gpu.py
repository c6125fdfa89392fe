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

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_meter import Meter
from peft import LoraConfig, get_peft_model
from report import parser, table
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.planner.cost import model_flops
from hf_longctx.planner.memory import MemoryModel
from hf_longctx.simulator.hardware import CLUSTERS
from hf_longctx.training.activations import ActivationMemory

NO_GPU = 2
"""Exit status where there is nothing to measure on."""
LORA_RANK = 16
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
NAMES = {"llama": "Llama 8B, all weights", "mixtral": "Mixtral 8x7B, LoRA"}
MARGIN = 0.9
"""Of the device: what offload is chosen for. The memory model is good to a tenth (estimate.py)."""
GROWTH = 1.25
"""Of the next probe where all have fitted."""
SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}

Row = dict[str, str]


@dataclass
class Setting:
    """Where and how is measured."""

    device: torch.device
    tiny: bool
    device_bytes: int
    """What a step may take of the device, its model included."""
    host_bytes: int
    """What optimizer and offloaded activations may take of the host."""
    optimizer_bytes: int
    """Per trained parameter."""
    optimizer_on_host: bool
    peak_flops: float | None
    pack: int
    step: int
    """Tokens: what the longest is a multiple of."""
    tile: int
    chunk: int
    layers: int
    lengths: list[int]
    seconds: float
    """Of one part."""
    output: Path | None
    meter: Meter = field(init=False)
    results: dict[str, Any] = field(default_factory=dict)
    begun: float = 0.0

    def __post_init__(self) -> None:
        self.meter = Meter(self.device)

    def left(self) -> float:
        """Seconds that this part still has."""
        return self.begun + self.seconds - time.monotonic()

    def clear(self) -> None:
        """What nobody holds any more is given back."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def result(self, name: str, row: Row, **figures: Any) -> None:
        """Prints and writes one result."""
        print(table([{"result": name} | row]) + "\n", flush=True)
        self.results[name] = row | figures
        if self.output is not None:
            self.output.write_text(json.dumps(self.results, indent=1) + "\n")

    def config(self, kind: str, layers: int | None = None) -> Any:
        """Llama 3 8B's shape, or Mixtral 8x7B's."""
        cls, vocabulary = (LlamaConfig, 128256) if kind == "llama" else (MixtralConfig, 32000)
        sizes = SIZES | {"vocab_size": vocabulary} | (TINY if self.tiny else {})
        if layers is not None:
            sizes = sizes | {"num_hidden_layers": layers}
        return cls(**sizes, max_position_embeddings=2**22, rope_parameters={"rope_type": "default", "rope_theta": 5e5})

    def model(self, kind: str, layers: int | None = None) -> Any:
        """On the device, with random weights; a Mixtral has adapters."""
        torch.manual_seed(0)
        with self.device:
            model = AutoModelForCausalLM.from_config(self.config(kind, layers), dtype=torch.bfloat16)
        if kind == "mixtral":
            model = get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules=LORA_TARGETS))
        patch_model(model, loss_chunk_tokens=self.chunk, mlp_tile_tokens=self.tile)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def memory_model(self, kind: str) -> MemoryModel:
        lora = {"lora_rank": LORA_RANK, "lora_targets": LORA_TARGETS} if kind == "mixtral" else {}
        return MemoryModel.from_config(
            self.config(kind),
            checkpointing=True,
            keep_attention=True,
            mlp_tile_tokens=self.tile,
            loss_chunk_tokens=self.chunk,
            optimizer_bytes=0 if self.optimizer_on_host else self.optimizer_bytes,
            accumulating=False,
            **lora,
        )


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
        held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        return cls(setting.memory_model(kind), held, setting.device_bytes - on_device, setting.host_bytes - on_host)

    def estimate(self, tokens: int, offload: float) -> int:
        return self.predicted.peak(tokens, round(1000 * offload)) - self.predicted.optimizer

    def offload(self, tokens: int) -> float:
        """As little as the memory model says is needed, or as the host allows."""
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
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def probe(setting: Setting, budget: Budget, model: Any, memory: ActivationMemory, layout: Layout) -> Probe:
    """Runs a step of this layout."""
    tokens, moved, begin = layout.tokens(0), memory.host.bytes_to_host, time.monotonic()
    offload = budget.offload(tokens)
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
        found = probe(setting, budget, model, memory, layout)
        setting.result(
            f"{name}/{what}",
            {
                "tokens": f"{found.tokens}",
                "fits": "yes" if found.fits else "no",
                "device GiB": f"{found.peak / 2**30:.3f}",
                "estimated GiB": f"{budget.estimate(found.tokens, found.offload) / 2**30:.3f}",
                "offload": f"{found.offload:.2f}",
                "host GiB": f"{found.host / 2**30:.3f}",
                "seconds": f"{found.seconds:.1f}",
            },
        )
        return found

    step = setting.step
    tried(pack(step, step), "one document")
    first = tried(pack(step, min(step, setting.pack)), "as many tokens in a pack")
    low, high, per_token = (step if first.fits else 0), (0 if first.fits else step), first.seconds / step
    tokens = max(2 * step, budget.likely(step))
    while (high == 0 or high - low > step) and per_token * tokens < setting.left():
        found = tried(pack(tokens, setting.pack), f"pack of {tokens}")
        if found.fits:
            low, per_token = tokens, found.seconds / tokens
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
    """Of forward and backward of one document, after one of a few tokens."""
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


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    options.add_argument("--device", default="cuda", help="default: %(default)s")
    options.add_argument("--tiny", action="store_true", help="models and lengths for a look without a GPU")
    options.add_argument("--tokens", type=int, nargs="+", help="of speed; default: 32768, 131072 and 524288")
    options.add_argument("--layers", type=int, default=3, help="of speed, beside 1 (default: %(default)s)")
    options.add_argument("--pack", type=int, default=32768, help="longest document of a pack (default: %(default)s)")
    options.add_argument("--minutes", type=float, default=9.0, help="of each part (default: %(default)s)")
    options.add_argument("--host-gib", type=float, help="that may be used; default: nine tenths of what is free")
    options.add_argument("--device-gib", type=float, help="that may be used; default: 97 %% of the device's")
    options.add_argument("--optimizer", choices=("host", "device"), default="host", help="where its states would be")
    options.add_argument("--optimizer-bytes", type=int, default=4, help="per trained parameter; AdamW in bfloat16: 4")
    options.add_argument("--peak-tflops", type=float, help="for MFU; default: the published one of a GPU that is known")
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
    setting = _setting(arguments, device)
    setting.results["machine"] = _machine(setting, device)
    print(json.dumps(setting.results["machine"], indent=1), flush=True)
    for part in arguments.part:
        setting.begun = time.monotonic()
        PARTS[part](setting)
    return 0


def _setting(arguments: Any, device: torch.device) -> Setting:
    tiny = arguments.tiny
    if arguments.device_gib is not None:
        device_bytes = int(arguments.device_gib * 2**30)
    elif device.type == "cuda":
        device_bytes = int(0.97 * torch.cuda.get_device_properties(device).total_memory)
    else:
        device_bytes = _free_host_bytes() // 4
    known = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    preset = next((each for name, each in CLUSTERS.items() if name in known), None)
    published = preset.matmul_flops if preset is not None else None
    host = int(0.9 * _free_host_bytes()) if arguments.host_gib is None else int(arguments.host_gib * 2**30)
    return Setting(
        device=device,
        tiny=tiny,
        device_bytes=device_bytes,
        host_bytes=host,
        optimizer_bytes=arguments.optimizer_bytes,
        optimizer_on_host=arguments.optimizer == "host",
        peak_flops=published if arguments.peak_tflops is None else arguments.peak_tflops * 1e12,
        pack=256 if tiny else arguments.pack,
        step=512 if tiny else 32768,
        tile=128 if tiny else 8192,
        chunk=64 if tiny else 2048,
        layers=arguments.layers,
        lengths=sorted(arguments.tokens or ([256, 512] if tiny else [2**15, 2**17, 2**19])),
        seconds=60 * arguments.minutes,
        output=arguments.json,
    )


def _machine(setting: Setting, device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "device GiB that may be used": round(setting.device_bytes / 2**30, 2),
        "host GiB that may be used": round(setting.host_bytes / 2**30, 2),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "peak TFLOP/s": None if setting.peak_flops is None else setting.peak_flops / 1e12,
    }


def _free_host_bytes() -> int:
    """MemAvailable (Linux), and no more than what the container's limit leaves."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free


if __name__ == "__main__":
    sys.exit(main())
