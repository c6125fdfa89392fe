"""Compiled parts of layers: two graphs for any layouts, the same loss and gradients, and layers that others still find.

The graphs are what torch.compile traces; the tests run them with the backend "aot_eager", which makes the same ones as
inductor in a fraction of its time. Reference: the same model as it is; 1e-5 of a parameter's largest gradient in float32.
"""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from accelerate.utils.dataclasses import get_module_class_from_name
from torch._dynamo.utils import counters
from transformers.models.llama import modeling_llama

from hf_longctx import Layout, Segment, patch_model, zigzag
from hf_longctx.models import compiled_layers as compiled
from hf_longctx.training.memory.activations import ActivationMemory
from tests.builders.tiny_models import FAMILIES, tiny_bloom, tiny_llama
from tests.builders.training.activation_steps import PACKED, run_held, step
from tests.worlds.rank_pool import RankPool


@pytest.fixture(autouse=True)
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    monkeypatch.setattr(compiled.CompiledLayer, "longctx_backend", "aot_eager")
    counters.clear()
    yield
    torch.compiler.reset()


def check_close(answer: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert answer.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(answer[name], value, rtol=0, atol=tolerance * float(value.abs().max()))


def of_length(length: int) -> Layout:
    return Layout({0: (Segment(0, 0, length), Segment(1, 0, length // 2 + 1))})


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.nightly), "mixtral"])
def test_two_graphs_for_twenty_layouts(family: str):
    model = patch_model(FAMILIES[family](torch.float32, num_hidden_layers=3), compile_layers=True).train()
    plain = patch_model(FAMILIES[family](torch.float32, num_hidden_layers=3)).train()
    for length in range(3, 43, 2):
        check_close(step(model, of_length(length), None), step(plain, of_length(length), None), 2e-5)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    check_close(
        step(model, Layout({0: (Segment(0, 0, 1),)}), None), step(plain, Layout({0: (Segment(0, 0, 1),)}), None)
    )
    assert counters["stats"]["unique_graphs"] == 2, "a single token is not compiled"


@pytest.mark.parametrize("tile", [pytest.param(0, marks=pytest.mark.nightly), 16])
def test_with_checkpointing_kept_attention_offload_and_tiles(tile: int):
    right = step(patch_model(tiny_llama(num_hidden_layers=4)).train(), PACKED, None)
    for checkpointing, keep in ((False, "never"), (True, "always"), (True, "never")):
        model = patch_model(tiny_llama(num_hidden_layers=4), compile_layers=True, mlp_tile_tokens=tile).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        memory = ActivationMemory(model, keep_attention=keep, device="cpu")
        check_close(step(model, PACKED, memory, 0.5), right)
        assert memory.host.bytes_to_host == memory.host.bytes_to_device > 0


def test_adapters():
    def adapted(**settings: Any) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj"], init_lora_weights=False)
        return patch_model(peft.get_peft_model(tiny_llama(), config), **settings).train()

    answer, right = (step(adapted(compile_layers=on), PACKED, None) for on in (True, False))
    assert sum("lora" in name for name in answer) == 12
    check_close(answer, right)


def test_layers_keep_their_names_and_change_back():
    model = patch_model(tiny_llama(), compile_layers=True)
    layer = type(model.model.layers[0])
    assert layer is not modeling_llama.LlamaDecoderLayer
    assert layer.__name__ == "LlamaDecoderLayer"
    assert get_module_class_from_name(model, "LlamaDecoderLayer") is layer
    assert model.state_dict().keys() == tiny_llama().state_dict().keys()
    ids = torch.arange(9)[None]
    assert torch.equal(model.eval()(ids).logits, tiny_llama().eval()(ids).logits), "without a layout as ever"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.model.layers[0]) is layer
    assert type(patch_model(model).model.layers[0]) is modeling_llama.LlamaDecoderLayer
    with pytest.raises(ValueError, match="compile_layers=True: BloomForCausalLM has no layer that can be compiled"):
        patch_model(tiny_bloom(), compile_layers=True)


def run_compiled(*arguments: Any) -> Any:
    """On one rank: `run_held` with compiled layers."""
    compiled.CompiledLayer.longctx_backend = "eager"  # the graphs as they were traced
    return run_held(*arguments, compile_layers=True)


def test_two_ranks_with_fsdp2_and_checkpointing(ranks2: RankPool):
    layout = Layout(zigzag(0, 41, range(2)), ulysses=2)
    right = ranks2.run(run_held, "llama", layout, False, "never", 0.0, False)
    answers = ranks2.run(run_compiled, "llama", layout, True, "always", 0.5, True)
    for (answer, _), (expected, _) in zip(answers, right):
        check_close(answer, expected)
