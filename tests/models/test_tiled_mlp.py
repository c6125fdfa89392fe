"""Tiled MLPs: the same loss and gradients, and inner activations of one tile only.

Reference: the same model without tiles. Gradients of weights are sums over tokens in another order: 1e-12 of the largest
in float64, 1e-5 in float32.
"""

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import MambaConfig, MambaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_longctx import Layout, Segment, patch_model, zigzag
from hf_longctx.models.adapters.peft_adapters import freeze
from hf_longctx.models.tiled_mlp import MlpForward
from hf_longctx.training.memory.activations import ActivationMemory
from tests.builders.tiny_models import FAMILIES, TINY, tiny_general, tiny_llama
from tests.builders.training.activation_steps import check_equal, run_held, step
from tests.worlds.rank_pool import RankPool

LAYOUT = Layout({0: (Segment(0, 0, 40), Segment(1, 0, 17))})
TILE = 16
"""Tokens: three whole tiles and a rest of nine."""


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "bloom", "mpt"])
def test_loss_and_gradients_are_those_without_tiles(family: str, checkpointing: bool):
    right = step(patch_model(FAMILIES[family](torch.float64)).train(), LAYOUT, None)
    model = patch_model(FAMILIES[family](torch.float64), mlp_tile_tokens=TILE).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = step(model, LAYOUT, None)
    assert gradients.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=1e-12 * float(value.abs().max()))


@pytest.mark.parametrize(
    ("family", "tiled"),
    [
        ("qwen3", "Qwen3MLP"),
        ("gemma2", "Gemma2MLP"),
        ("gpt_oss", "GptOssExperts"),
        ("deepseek_v3", "DeepseekV3Experts"),
    ],
)
def test_mlps_and_experts_of_other_families_run_in_tiles(family: str, tiled: str):
    right = step(patch_model(tiny_general(family, torch.float64)).train(), LAYOUT, None)
    model = patch_model(tiny_general(family, torch.float64), mlp_tile_tokens=TILE).train()
    in_tiles = {
        type(module).__name__ for module in model.modules() if isinstance(vars(module).get("forward"), MlpForward)
    }
    assert tiled in in_tiles
    gradients = step(model, LAYOUT, None)
    for name, value in right.items():
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=1e-9 * float(value.abs().max()))


def test_a_model_without_an_mlp_runs_no_tiles():
    with pytest.raises(ValueError, match=r"mlp_tile_tokens=16: MambaForCausalLM has no MLP .* Valid: 0"):
        patch_model(
            MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)), mlp_tile_tokens=TILE
        )


def test_under_autocast_as_close_as_without_tiles():
    """bfloat16 autocast against float32: 2 % of a parameter's largest gradient, with tiles and without."""
    right = step(patch_model(tiny_llama()).train(), LAYOUT, None)
    for tile in (0, TILE):
        with torch.autocast("cpu", torch.bfloat16):
            gradients = step(patch_model(tiny_llama(), mlp_tile_tokens=tile).train(), LAYOUT, None)
        for name, value in right.items():
            assert gradients[name].dtype == torch.float32
            error = float((gradients[name] - value).abs().max() / value.abs().max())
            assert error < 0.05, (tile, name)


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    # Of 512 tiles: a sum in bfloat16 would stop growing after 256 terms.
    module = patch_model(tiny_llama(torch.bfloat16), mlp_tile_tokens=1).model.layers[0].mlp
    x = torch.ones(1, 512, 64, dtype=torch.bfloat16)
    module(x).sum().backward()
    whole = LlamaMLP(module.config).bfloat16()
    whole.load_state_dict(module.state_dict())
    whole(x).sum().backward()
    for ours, right in zip(module.parameters(), whole.parameters()):
        torch.testing.assert_close(ours.grad, right.grad, rtol=2e-2, atol=1e-2)


def test_a_recomputed_layer_runs_its_mlp_twice_in_all(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: (calls.append(x.shape[1]), forward(self, x))[1])
    model = patch_model(tiny_llama(), mlp_tile_tokens=TILE).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    step(model, LAYOUT, ActivationMemory(model, keep_attention="always", device="cpu"))
    assert sorted(calls) == sorted(2 * 2 * [TILE, TILE, TILE, 9]), "two layers, forward and backward"


def test_only_one_tile_is_there_at_once():
    """Allocator's peak of forward and backward of one MLP: its input, output and their gradients, gradients of the
    weights, and inner activations of 64 tokens in the place of 1024."""

    def peak(tile: int) -> int:
        config = tiny_llama(**(TINY | {"intermediate_size": 1024})).config
        model = patch_model(tiny_llama(**(TINY | {"intermediate_size": 1024})), mlp_tile_tokens=tile)
        assert config.intermediate_size == 1024
        mlp, x = model.model.layers[0].mlp, torch.ones(1, 1024, 64, requires_grad=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            mlp(x).sum().backward()
        events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        return max(itertools.accumulate(event.nbytes() for event in events))

    row, inner, weights = 1024 * 64 * 4, 1024 * 1024 * 4, 3 * 64 * 1024 * 4
    assert peak(0) > 4 * inner, "gate, its silu, up and their product"
    assert peak(64) < 4 * row + 2 * weights + 6 * inner // 16 + 2**16


def test_dropout_repeats_its_random_numbers():
    """Reference: the tiles as plain calls, one after another."""
    model = tiny_llama(num_hidden_layers=1)
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "down_proj"], lora_dropout=0.5, init_lora_weights=False)
    torch.manual_seed(0)
    mlp = (
        patch_model(peft.get_peft_model(model, config), mlp_tile_tokens=TILE)
        .train()
        .get_base_model()
        .model.layers[0]
        .mlp
    )
    x = torch.randn(1, 57, 64)

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        mlp.zero_grad()
        out = run(x)
        torch.rand(3)  # what others draw between forward and backward
        out.square().sum().backward()
        return [out.detach(), *(parameter.grad.clone() for parameter in mlp.parameters() if parameter.requires_grad)]

    tiled = gradients(mlp)
    right = gradients(lambda x: torch.cat([type(mlp).forward(mlp, tile) for tile in x.split(TILE, dim=1)], dim=1))
    for ours, expected in zip(tiled, right):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_first_layers_that_are_frozen_need_no_backward(family: str):
    def frozen(**settings: Any) -> Any:
        model = patch_model(FAMILIES[family](torch.float64), **settings).train()
        freeze(model, ["model.embed_tokens", "model.layers.0"])
        return model

    right = step(frozen(), LAYOUT, None)
    gradients = step(frozen(mlp_tile_tokens=TILE), LAYOUT, None)
    assert gradients.keys() == right.keys()
    assert not any("layers.0" in name for name in gradients)
    for name, value in right.items():
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=1e-12 * float(value.abs().max()))


def test_settings_change_and_experts_elsewhere_are_left_alone():
    model = patch_model(FAMILIES["llama"](torch.float32), mlp_tile_tokens=TILE)
    copied = pickle.loads(pickle.dumps(model))
    assert all("forward" in layer.mlp.__dict__ for layer in copied.model.layers)
    patch_model(model)
    assert not any("forward" in layer.mlp.__dict__ for layer in model.model.layers)
    routed = FAMILIES["mixtral"](torch.float32)

    def elsewhere(*tensors: Any) -> None: ...

    routed.model.layers[0].mlp.experts.forward = elsewhere
    patch_model(routed, mlp_tile_tokens=TILE)
    assert routed.model.layers[0].mlp.experts.forward is elsewhere
    with pytest.raises(ValueError, match="mlp_tile_tokens=-1 must be a number of tokens, or 0"):
        patch_model(model, mlp_tile_tokens=-1)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_with_offload_on_two_ranks_and_sharded_layers(ranks2: RankPool, family: str):
    layout = Layout(zigzag(0, 41, range(2)), ulysses=2)
    right = ranks2.run(run_held, family, layout, True, "always", 0.0, False, mlp_tile_tokens=7)
    for sharded in (False, True):
        answers = ranks2.run(run_held, family, layout, True, "always", 0.5, sharded, mlp_tile_tokens=7)
        for (answer, _), (expected, _) in zip(answers, right):
            if sharded:
                for name, value in expected.items():
                    torch.testing.assert_close(answer[name], value, rtol=0, atol=1e-6 * float(value.abs().max()))
            else:
                check_equal(answer, expected)
    plain = ranks2.run(run_held, family, layout, False, "never", 0.0, False)
    for (answer, _), (expected, _) in zip(right, plain):
        for name, value in expected.items():
            torch.testing.assert_close(answer[name], value, rtol=0, atol=1e-5 * float(value.abs().max()))
