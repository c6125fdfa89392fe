"""`hf-longctx estimate`, and what the memory model says of adapters, kept attention and tiles, beside real models."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import FalconConfig, FalconForCausalLM

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.cli import main
from hf_longctx.hardware.devices import H100
from hf_longctx.hardware.kernel_bytes import flash_2
from hf_longctx.hardware.model_sizes import ModelSizes
from hf_longctx.hardware.published import ARCHITECTURES
from hf_longctx.planner.memory.device_bytes import MARGIN, bytes_outside
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.training.memory.activations import ActivationMemory
from tests.builders.tiny_models import tiny_bloom, tiny_llama, tiny_mixtral, tiny_mpt
from tests.builders.training.allocated_steps import (
    CHUNK,
    KERNEL_SCRATCH,
    Step,
    allocated_bytes,
    one_document,
    saved_bytes,
)

GIB = 2**30
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


# The command line


def printed(capsys: Any, *arguments: str) -> str:
    assert main(["estimate", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_each_sharding_has_its_parts_and_its_longest_context(capsys):
    shown = printed(capsys, "llama-7b", "--context", "1000000", "--gpus", "64")
    config = ARCHITECTURES["llama-7b"]
    for sharding in ("ddp", "zero1", "zero2", "zero3"):
        memory = MemoryModel.from_config(
            config,
            **{"sharding": sharding, "world_size": 64, "weight_bytes": 4, "activation_bytes": 2, "checkpointing": True},
            workspace=flash_2,
        )
        memory = replace(memory, outside=bytes_outside(64, 8))
        cells = next(line for line in shown.splitlines() if line.startswith(f"{sharding} ")).split()
        if sharding == "ddp":  # 16 bytes of each of 6.7e9 parameters
            assert cells[-2:] == ["0", "0"]
            assert "ddp: does not fit: weights, gradients and optimizer alone take 112.9 GiB" in shown
            continue
        capacity = memory.capacity(H100.device_bytes, MARGIN)
        needed = -(-1_000_000 // capacity)
        parts = memory.parts(-(-1_000_000 // needed))
        assert cells[-2:] == [f"{capacity:,}", f"{64 * capacity:,}"]
        assert float(cells[1]) == pytest.approx(parts["weights"] / GIB, abs=0.01)
        assert float(cells[4]) == pytest.approx((parts["activations"] + parts["working"]) / GIB, abs=0.01)
        assert float(cells[7]) == pytest.approx(memory.outside / GIB, abs=0.01)
        assert float(cells[8]) == pytest.approx(sum(parts.values()) / GIB, abs=0.01)
        assert f"{sharding}: the document needs {needed} of 64 GPUs" in shown


def test_a_document_longer_than_all_ranks_hold(capsys):
    shown = printed(capsys, "llama-7b", "--context", "9000000", "--gpus", "8", "--device", "h200")
    assert "zero3: does not fit: 9,000,000 tokens need" in shown
    assert "and there are 8" in shown


def test_optimizer_and_activations_in_host_memory(capsys):
    arguments = ["llama-7b", "--context", "100000", "--gpus", "8", "--optimizer-on-host"]
    shown = printed(capsys, *arguments)
    assert "ddp" not in shown  # which has no FSDP2 that could
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith("zero")}
    parameters = ModelSizes.of(ARCHITECTURES["llama-7b"], 1).parameters
    assert float(rows["zero2"][9]) == pytest.approx(16 * parameters / 8 / GIB, abs=0.01)
    assert rows["zero2"][3] == "0.00"
    shown = printed(capsys, *arguments, "--offload", "1.0", "--memory", "40")
    more = next(line for line in shown.splitlines() if line.startswith("zero2")).split()
    assert float(more[9]) > float(rows["zero2"][9])


def test_processors_without_instructions_for_bfloat16_take_memory_to_multiply_it(capsys):
    """Beside the logits, 4 bytes for each of 1024 x 32,000."""
    options = ("llama-7b", "--context", "8K", "--gpus", "1", "--memory", "512", "--dtype", "mixed")
    working = {}
    for kind in ("avx512", "avx512_bf16"):
        shown = printed(capsys, *options, "--device", f"cpu-{kind}")
        working[kind] = sum(
            float(cell) for cell in next(line for line in shown.splitlines() if line.startswith("ddp ")).split()[4:7]
        )
    assert working["avx512"] - working["avx512_bf16"] >= 4 * 1024 * 32_000 / GIB - 0.02


def test_what_an_all_to_all_brings_is_kept_with_attention(capsys):
    def fits(*arguments: str) -> int:
        shown = printed(capsys, "llama-7b", "--context", "1000", "--gpus", "8", *arguments)
        row = next(line for line in shown.splitlines() if line.startswith("zero3"))
        return int(row.split()[-2].replace(",", ""))

    bare = fits()
    assert 0.95 * bare < fits("--ulysses-degree", "4") < bare, "in the one layer that is recomputed"
    assert fits("--keep-attention", "--ulysses-degree", "4") < 0.5 * fits("--keep-attention") < 0.5 * bare


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-7b", "--gpus", "3", "--tensor-parallel", "2"], "--tensor-parallel 2 must divide --gpus 3; valid: [1, 3]"),
        (["llama-7b", "--gpus", "2", "--device", "tpu"], "--device 'tpu' is unknown; valid: a100, h100"),
        (["llama-7b", "--gpus", "2", "--lora-targets", "q_proj"], "--lora-targets q_proj needs --lora"),
        (["llama-7b", "--gpus", "2", "--memory", "-1"], "--memory -1 must be positive"),
        (["mistral-8x7b", "--gpus", "2", "--lora", "8", "--lora-targets", "w1"], "experts are no torch.nn.Linear"),
        (["/no/such/model", "--gpus", "2"], "'/no/such/model' is no preset"),
        (["qwen3-8c", "--gpus", "2"], "gemma-2-9b, gemma-3-12b-pt"),
        (["qwen3-8c", "--gpus", "2"], "did you mean 'qwen3-8b'?"),
    ],
)  # fmt: skip
def test_what_cannot_be_estimated(capsys, arguments: list[str], message: str):
    assert main(["estimate", *arguments, "--context", "1000"]) == 2
    assert message in capsys.readouterr().err


def test_what_is_known_of_a_model_that_cannot_be_counted_is_said(capsys, tmp_path):
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = FalconConfig(**sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in FalconForCausalLM(config).parameters())
    command = ["estimate", str(tmp_path), "--context", "1000", "--gpus", "4", "--dtype", "float32"]
    assert main(command) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "'falcon': memory cannot be counted" in message
    assert f"weights, gradients and optimizer of its {parameters:,} parameters take" in message
    assert "activations come on top" in message
    assert main([*command, "--lora", "8"]) == 2
    assert f"weights alone of its {parameters:,} parameters" in " ".join(capsys.readouterr().err.split())


# Adapters


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda dtype: tiny_llama(dtype, num_hidden_layers=3),
    "mixtral": lambda dtype: tiny_mixtral(dtype, num_hidden_layers=3),
    "bloom": lambda dtype: tiny_bloom(dtype, n_layer=3),
    "mpt": lambda dtype: tiny_mpt(dtype, n_layers=3),
}
RANK = 4


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_counted_exactly(family: str):
    model = FAMILIES[family](torch.float32)
    sizes = ModelSizes.of(model.config, 1)
    adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules=list(sizes.projections)))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert sizes.adapter_parameters(RANK, None) == trained
    memory = MemoryModel.from_config(model.config, lora_rank=RANK)
    assert memory.optimizer == 8 * trained  # float32, two states
    assert memory.gradients == 4 * trained


class AdapterStep(Step):
    """A step of a model with adapters."""

    def __init__(self, dtype: torch.dtype, targets: tuple[str, ...], checkpointing: bool, tokens: int) -> None:
        super().__init__("llama", "bfloat16" if dtype == torch.bfloat16 else "float32", False, one_document(tokens))
        bare = FAMILIES["llama"](dtype)
        self.model = patch_model(
            get_peft_model(bare, LoraConfig(r=RANK, target_modules=list(targets))), loss_chunk_tokens=CHUNK
        )
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYTHING = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ATTENTION, EVERYTHING])
def test_what_adapters_keep(targets: tuple[str, ...], dtype: torch.dtype):
    """Bytes per additional token."""
    small, large = (AdapterStep(dtype, targets, False, tokens) for tokens in (128, 384))
    measured = (saved_bytes(large) - saved_bytes(small)) / 256
    memory = MemoryModel.from_config(
        small.model.config,
        lora_rank=RANK,
        lora_targets=targets,
        weight_bytes=dtype.itemsize,
        activation_bytes=dtype.itemsize,
    )
    unseen = 24 + (4 * 64 + 4)  # ids, positions and labels; the first norm, whose input needs no gradient
    assert memory.token - unseen == pytest.approx(measured, rel=0.005)


# Kept attention and tiles


@pytest.mark.parametrize("settings", [{}, {"keep_attention": True}, {"mlp_tile_tokens": 256}])
def test_peak_with_kept_attention_and_tiles(settings: dict[str, Any]):
    tokens = 2048
    step = Step("llama", "float32", True, one_document(tokens))
    patch_model(step.model, loss_chunk_tokens=CHUNK, mlp_tile_tokens=settings.get("mlp_tile_tokens", 0))
    choice = "always" if settings.get("keep_attention") else "never"
    layers = ActivationMemory(step.model, keep_attention=choice, device="cpu")
    memory = MemoryModel.from_config(
        step.model.config, weight_bytes=4, activation_bytes=4, checkpointing=True, loss_chunk_tokens=CHUNK, **settings
    )
    with layers.micro_batch(Layout({0: (Segment(0, 0, tokens),)}), 0):
        measured = allocated_bytes(step)
    predicted = (
        memory.peak(tokens) - memory.optimizer - sum(2 * parameter.nbytes for parameter in step.model.parameters())
    )
    assert 0.95 * (measured - KERNEL_SCRATCH) <= predicted <= 1.1 * measured


# Benchmarks


@pytest.mark.nightly
def test_the_benchmark_of_one_gpu_runs_all_parts_on_a_cpu(monkeypatch, capsys, tmp_path):
    import gpu

    results = tmp_path / "gpu.json"
    monkeypatch.setattr(
        sys, "argv",
        ["gpu.py", "--device", "cpu", "--tiny", "--device-gib", "0.2", "--host-gib", "0.1", "--minutes", "0.02",
         "--layers", "2", "--tokens", "256", "--peak-tflops", "1", "--json", str(results)],
    )  # fmt: skip
    assert gpu.main() == 0
    shown = capsys.readouterr().out
    for name in ("longest/Llama 8B, all weights", "speed/Llama 8B, all weights/256", "longest/Mixtral 8x7B, LoRA"):
        assert name in shown
        assert name in Path(results).read_text()
    assert "extrapolated" in shown
    assert "counted, not allocated" in shown
    assert "MFU" in shown


def test_the_benchmark_of_one_gpu_says_so_without_one(monkeypatch, capsys):
    import gpu

    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == gpu.NO_GPU
    assert "torch sees none" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_benchmarked_estimate_is_close():
    import estimate

    case = estimate.Case("small", "ddp, 1 rank", True, 256)
    _, figures, _ = estimate.compare([case])
    assert figures[f"{case.name}/error"] <= 0.10


def test_rotations_of_stretched_positions_change_no_byte():
    plain = transformers.LlamaConfig()
    stretched = transformers.LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    assert MemoryModel.from_config(plain).parts(4096) == MemoryModel.from_config(stretched).parts(4096)
