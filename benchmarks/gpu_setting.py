"""What gpu.py measures: on which device, with how much memory, and models of which shape."""

import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_meter import Meter
from peft import LoraConfig, get_peft_model
from report import table
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from hf_longctx import patch_model
from hf_longctx.hardware.devices import preset_of
from hf_longctx.planner.memory.memory_model import MemoryModel

LORA_RANK = 16
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
NAMES = {"llama": "Llama 8B, all weights", "mixtral": "Mixtral 8x7B, LoRA"}
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
    told: Callable[[str, Row, dict[str, Any]], None] | None = None
    """Called with the name, the row and the figures of each result."""

    def __post_init__(self) -> None:
        self.meter = Meter(self.device)

    def left(self) -> float:
        """Seconds that this part still has."""
        return self.begun + self.seconds - time.monotonic()

    def clear(self) -> None:
        """Give back what nobody holds any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def result(self, name: str, row: Row, **figures: Any) -> None:
        """Prints and writes one result."""
        print(table([{"result": name} | row]) + "\n", flush=True)
        self.results[name] = row | figures
        if self.told is not None:
            self.told(name, row, figures)
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


def setting_of(arguments: Any, device: torch.device) -> Setting:
    tiny = arguments.tiny
    if arguments.device_gib is not None:
        device_bytes = int(arguments.device_gib * 2**30)
    elif device.type == "cuda":
        device_bytes = int(0.97 * torch.cuda.get_device_properties(device).total_memory)
    else:
        device_bytes = _free_host_bytes() // 4
    preset = preset_of(torch.cuda.get_device_name(device) if device.type == "cuda" else None)
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


def machine(setting: Setting, device: torch.device) -> dict[str, Any]:
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
