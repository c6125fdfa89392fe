"""Models counted from their modules on shapes alone: against torch's flop counter on real tiny models, against the formulas of
Llama, Mistral and Mixtral, against published sizes, and by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.emu3.configuration_emu3 import Emu3TextConfig
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from hf_longctx.commands.shared.costs import read_config
from hf_longctx.commands.shared.models import transformers_config
from hf_longctx.counting.building import class_with_head
from hf_longctx.counting.count import SHORT, count_kept, count_model
from hf_longctx.hardware import model_sizes
from hf_longctx.hardware.kernel_bytes import Conditions, float32_operands
from hf_longctx.hardware.model_sizes import ModelSizes, model_flops, windowed_layers
from hf_longctx.hardware.published import PUBLISHED, Architecture, Published, hub_id
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.memory.activation_bytes import Adapters, Precision, TokenBytes
from hf_longctx.planner.memory.counted_bytes import CountedTokenBytes
from hf_longctx.planner.memory.memory_model import MemoryModel

TOKENS = 64
"""A whole block of the gated delta rule."""
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
}
BOTH_KINDS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "gemma2": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 7, "layer_types": BOTH_KINDS},
    "gpt_oss": {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": BOTH_KINDS},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "deepseek_v3": EXPERTS | LATENT,
    "olmo2": {},
    "phi3": {},
    "smollm3": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 8},
    "qwen3_next": EXPERTS
    | {
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}


def tiny(family: str, **fields: Any) -> Any:
    """A configuration of two small layers."""
    sizes = {} if family == "gpt2" else {k: v for k, v in SIZES.items() if family != "mamba" or "head" not in k}
    if family == "deepseek_v3":
        del sizes["head_dim"]
    return transformers.AutoConfig.for_model(family, **(sizes | FAMILIES[family] | fields))


ALIKE = ("qwen2", "olmo2", "phi3", "smollm3", "qwen3_moe")
"""Families whose layers run what those of Llama, Qwen3 or GLM 4 do."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.nightly) if name in ALIKE else name for name in FAMILIES]
)
def test_flops_are_those_that_torch_counts(family: str):
    # Of a real model, eager: products with weights exactly, attention as all pairs, experts as they are routed.
    config = tiny(family)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    totals = []
    for tokens in (TOKENS, 2 * TOKENS):  # their difference: convolutions pad both alike
        counter = FlopCounterMode(display=False, depth=4)
        with torch.no_grad(), counter:
            model(input_ids=torch.arange(tokens)[None] % 100, use_cache=False)
        by_module = counter.get_flop_counts()
        rotations = sum(sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb"))
        totals.append(counter.get_total_flops() - rotations)
    counted = count_model(config)
    pairs = 2 * 3 * TOKENS**2 * sum(shape.flops for shape in counted.attention)
    assert totals[1] - totals[0] == TOKENS * counted.linear_flops + pairs
    assert counted.parameters == model.num_parameters()
    assert counted.head_flops == 2 * model.get_output_embeddings().weight.numel()
    assert counted.notes == ()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 9}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_counts_are_those_of_the_formulas(family: str, fields: dict[str, Any]):
    """FLOPs, sizes, and what is kept of a layer, in every precision and with adapters: byte for byte."""
    config = transformers.AutoConfig.for_model(family, **(SIZES | fields))
    counted = count_model(config)
    assert model_sizes._counted_flops(counted) == model_flops(config)
    sizes, by_modules = ModelSizes.of(config, 1), model_sizes._counted_sizes(counted, family, 1)
    assert by_modules.parameters == sizes.parameters
    if not fields.get("mlp_bias"):
        assert by_modules == sizes
    for weight, activation in ((4, 4), (2, 2), (4, 2)):
        conditions = Conditions(activation)
        precision = Precision(weight, activation, workspace=lambda shape, of=conditions: float32_operands(shape, of))
        formula, kept = TokenBytes(sizes, precision), CountedTokenBytes(by_modules, config, precision)
        assert kept.recomputing <= formula.recomputing
        not_alike = {"inner": 0, "recomputing": 0, "mlp_working": 0}
        assert (vars(formula) | not_alike) == (vars(kept) | not_alike)
        assert formula.inner - kept.inner == (4 * 4 + 40 * 2 + 4 if sizes.experts else 0)  # routing, not in the MLP
    for precision, targets in ((Precision(2, 2), ("q_proj", "v_proj")), (Precision(4, 2), tuple(sizes.projections))):
        kept = CountedTokenBytes(by_modules, config, precision, 8, targets)
        assert TokenBytes(sizes, precision, Adapters(targets, 8)).layer == kept.layer


@pytest.mark.parametrize(
    ("family", "experts", "targets"),
    [("llama", 1, ("q_proj", "v_proj")), ("llama", 1, None), ("mixtral", 2, None)],
    ids=["attention", "all", "frozen experts"],
)
def test_adapters_need_what_a_layer_that_is_run_holds(family: str, experts: int, targets: tuple[str, ...] | None):
    """Recomputing an MLP and its backward, where widths are to each other as in models of 8B."""
    wide = {"intermediate_size": 28 * SIZES["hidden_size"] // 8 // 8 * 8}
    chosen = {"num_local_experts": 2 * experts, "num_experts_per_tok": experts} if experts > 1 else {}
    config = transformers.AutoConfig.for_model(family, **(SIZES | wide | chosen))
    sizes = ModelSizes.of(config, 1)
    by_modules = model_sizes._counted_sizes(count_model(config), family, 1)
    names = sizes.adapted(targets)
    for precision in (Precision(2, 2), Precision(2, 2, adapter=2), Precision(4, 2), Precision(4, 4)):
        formula = TokenBytes(sizes, precision, Adapters(names, 8))
        kept = CountedTokenBytes(by_modules, config, precision, 8, names)
        working = max(kept.recomputing, kept.flowing + kept.mlp_working)
        assert 1.0 <= (formula.layer + formula.recomputing) / (kept.layer + working) <= 1.15


def test_windows_chunks_and_widths_by_hand():
    gemma = count_model(tiny("gemma3_text"))
    assert [shape.window for shape in gemma.attention] == [7, None]
    assert windowed_layers(tiny("gemma3_text")) == (1, 7)
    flops = model_flops(tiny("gemma3_text"))
    assert (flops.attention, flops.windowed, flops.window) == (2 * 6 * 4 * 16, 6 * 4 * 16, 7)
    # Multi-head latent attention: queries and keys of 24, values of 16, which four heads exchange.
    latent = model_flops(tiny("deepseek_v3"))
    assert (latent.attention, latent.kv_elements) == (2 * 3 * 4 * (24 + 16), 2 * 4 * (24 + 16))
    # A layer without attention exchanges nothing.
    assert model_flops(tiny("qwen3_next")).kv_elements == 2 * 2 * 16
    assert count_model(tiny("qwen3_next")).state_layers == 1
    # Qwen2-MoE has its window in its masks alone; Llama 4 has chunks, which cost as much as a window of half of them.
    fields = {**SIZES, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32, "sliding_window": 20}
    moe = transformers.Qwen2MoeConfig(**fields, use_sliding_window=True, layer_types=[BOTH_KINDS[0]] * 2)
    assert {shape.window for shape in count_model(moe).attention} == {20}
    chunked = transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=96, num_local_experts=4, attention_chunk_size=8, no_rope_layers=[1, 0]
    )
    assert [(shape.chunk, shape.reach) for shape in count_model(chunked).attention] == [(8, 4), (None, None)]


def test_tokens_cost_their_experts_alone():
    few, many = (count_model(tiny("qwen3_moe", num_experts=n)) for n in (4, 8))
    expert, routers = 3 * 64 * 32, 2 * 4 * 64
    assert many.parameters - few.parameters == 2 * 4 * expert + routers
    assert many.active_parameters - few.active_parameters == routers
    assert (many.experts, many.experts_per_token, many.expert_parameters) == (8, 2, 8 * expert)


PARAMETERS = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "google/gemma-3-1b-pt": 999_885_952,
    "openai/gpt-oss-20b": 20_914_757_184,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
}
"""Of the published checkpoints. DeepSeek-V3 names 671B; its corrections of routing are buffers in transformers."""
CARDS = {
    "Qwen/Qwen3-235B-A22B": 235e9,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 80e9,
    "zai-org/GLM-4-32B-0414": 32.6e9,
    "zai-org/GLM-4.5": 355e9,
    "allenai/OLMo-2-0425-1B": 1.48e9,
    "allenai/OLMo-2-1124-13B": 13.7e9,
    "allenai/OLMo-2-0325-32B": 32.2e9,
    "ByteDance-Seed/Seed-OSS-36B-Base": 36.2e9,
    "meta-llama/Llama-3.1-405B": 405.9e9,
    "Qwen/Qwen3-14B": 14.8e9,
    "Qwen/Qwen3-32B": 32.8e9,
    "google/gemma-3-4b-pt": 4.30e9 - 0.42e9,
    "google/gemma-3-12b-pt": 12.19e9 - 0.42e9,
    "google/gemma-3-27b-pt": 27.43e9 - 0.42e9,
    "openai/gpt-oss-120b": 116.83e9,
    "zai-org/GLM-4.5-Air": 106e9,
    "allenai/OLMo-2-1124-7B": 7.3e9,
    "microsoft/phi-4": 14.7e9,
}
"""As the models' cards have them; those of Gemma 3 with a tower for images of 0.42e9, which is not counted."""


PERIODS = {"qwen3_next": 4}
"""Layers after which kinds of layers repeat, where there are several with different weights."""
SAME_SIZES = {
    "Qwen/Qwen3-4B-Instruct-2507": "Qwen/Qwen3-4B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "Qwen/Qwen3-30B-A3B",
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
}
"""Models that differ from another in weights and context alone."""


def parameters_of(name: str) -> int:
    """Those of the true model: of one with its first layers, and what each further period of layers adds."""
    config = transformers_config(PUBLISHED[name])
    period = PERIODS.get(config.model_type, 1)
    first = getattr(config, "first_k_dense_replace", 0) + period
    few, more = (made_with(PUBLISHED[name], layers) for layers in (first, first + period))
    return few + (config.num_hidden_layers - first) // period * (more - few)


def made_with(sizes: Published | Architecture, layers: int) -> int:
    """Parameters of a model with so many layers."""
    if isinstance(sizes, Architecture):
        config = transformers_config(replace(sizes, num_hidden_layers=layers))
    else:
        config = transformers_config(Published(sizes.model_type, {**sizes.fields, "num_hidden_layers": layers}))
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).num_parameters()


@pytest.mark.parametrize("name", PARAMETERS | CARDS)
def test_published_models_have_their_published_sizes(name: str):
    published = (PARAMETERS | CARDS)[name]
    assert parameters_of(name) == pytest.approx(published, rel=1e-6 if name in PARAMETERS else 1e-2)


@pytest.mark.parametrize("name", SAME_SIZES)
def test_models_of_the_same_sizes_differ_in_their_context_at_most(name: str):
    own, other = (dict(PUBLISHED[model].fields) for model in (name, SAME_SIZES[name]))
    assert own.pop("max_position_embeddings") >= other.pop("max_position_embeddings")
    assert own == other


def test_a_published_mixture_is_counted_as_its_card_says():
    """20.9B, of which 3.6B are active, embeddings left out; every second layer sees 128 tokens."""
    counted, flops = count_model(read_config("gpt-oss-20b")), model_flops(read_config("gpt-oss-20b"))
    assert counted.parameters == PARAMETERS["openai/gpt-oss-20b"]
    assert counted.active_parameters == pytest.approx(3.6e9, rel=1e-2)
    assert (2 * flops.windowed, flops.window, len(counted.attention)) == (flops.attention, 128, 24)


def test_every_published_family_without_a_formula_is_checked():
    others = {name for name, sizes in PUBLISHED.items() if not isinstance(sizes, Architecture)}
    assert others - set(PARAMETERS | CARDS | SAME_SIZES) == {"Qwen/Qwen3-1.7B"}
    assert hub_id("qwen3-8b") == "Qwen/Qwen3-8B"
    assert read_config("qwen3-8b").num_hidden_layers == 36
    assert hub_id("somebody/qwen3-8b") == "somebody/qwen3-8b"


def test_the_same_fields_are_counted_once_and_may_be_any_objects():
    config, drawn = tiny("qwen3"), torch.get_rng_state()
    assert count_model(config) is count_model(tiny("qwen3"))
    MemoryModel.from_config(tiny("gpt_oss"), lora_rank=8)
    assert torch.equal(torch.get_rng_state(), drawn)  # a run that counts its model draws what it drew before
    plain = SimpleNamespace(model_type="qwen3", **SIZES)
    assert model_flops(plain) == model_flops(config)
    assert CostModel.from_config(plain) == CostModel.from_config(config)
    assert config._attn_implementation != "hf_longctx_counting"


def test_memory_of_a_family_without_a_formula():
    config = tiny("qwen3_next")
    memory = MemoryModel.from_config(config, sharding="zero3", world_size=4)
    sizes = ModelSizes.of(config, 1)
    largest = max(layer.parameters for layer in count_model(config).layers)
    assert (sizes.layer_parameters, sizes.layers_parameters < 2 * largest) == (largest, True)
    assert memory.layer_token == -(-sum(layer.whole for layer in count_kept(config, 2, 2).layers) // 2)
    adapted = MemoryModel.from_config(config, lora_rank=8, lora_targets=["q_proj"])
    assert adapted.optimizer == 8 * 8 * (64 + 2 * 4 * 16)  # queries and their gates, in one of the layers
    with pytest.raises(ValueError, match=r"LoRA targets \['query'\] are unknown"):
        MemoryModel.from_config(config, lora_rank=8, lora_targets=["query"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "model_type='t5' cannot be counted: transformers makes no causal language model"),
        (
            transformers.JetMoeConfig(hidden_size=64, num_hidden_layers=1, vocab_size=128),
            r"'jetmoe' cannot be counted: its forward does not run on shapes alone, .*modeling_jetmoe.py:\d+\)",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused_with_the_reason(config: Any, message: str):
    with pytest.raises(ValueError, match=message):
        CostModel.from_config(config)


def test_other_refusals():
    falcon = transformers.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    assert "computes its own scores" in count_model(falcon).notes[0]
    assert model_flops(falcon).kv_elements == 2 * 2 * 16  # one head of keys and values
    # Mamba 2's blocks of states are no attention, though torch's fallback multiplies all with all.
    states = transformers.Mamba2Config(
        hidden_size=64, num_hidden_layers=1, vocab_size=128, num_heads=8, head_dim=16, n_groups=1, chunk_size=8
    )
    assert (count_model(states).attention, model_flops(states).kv_elements) == ((), 0)
    assert MemoryModel.from_config(states).exchange == 0
    with pytest.raises(ValueError, match=r"'falcon': memory cannot be counted\. Its attention does not go through"):
        MemoryModel.from_config(falcon)
    with pytest.raises(ValueError, match="tensor_parallel=2: a rank's share of a qwen3 model is not counted; valid: 1"):
        MemoryModel.from_config(tiny("qwen3"), tensor_parallel=2)
    assert SHORT[1] == 2 * SHORT[0]


@pytest.mark.parametrize("tied", [False, True])
def test_the_language_model_of_a_model_that_sees_is_counted_as_one_with_a_head(tied: bool):
    """Qwen3-VL's, as Qwen3 of the same sizes: transformers has no class of it with a head."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": tied,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    seeing = count_model(transformers.Qwen3VLTextConfig(**sizes, rope_parameters=rope))
    assert seeing == count_model(transformers.Qwen3Config(**sizes))


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (Emu3TextConfig, {}),
        (
            MllamaTextConfig,
            {"cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ),
    ],
    ids=["emu3", "mllama"],
)
def test_a_language_model_that_is_listed_under_the_whole_models_type_is_counted(config: type, fields: dict[str, Any]):
    """FLOPs and exchange as of a Llama of as many layers; Mllama's, without images, runs all but those that look at them."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    text = config(**sizes, **fields)
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in class_with_head(text)(text).parameters())
    counted, seeing = model_flops(text), len(fields.get("cross_attention_layers", ()))
    assert count_model(text).parameters == parameters
    llama = model_flops(transformers.LlamaConfig(**(sizes | {"num_hidden_layers": 3 - seeing})))
    assert replace(counted, parameters=0) == replace(llama, parameters=0)
    assert MemoryModel.from_config(text, sharding="zero3", world_size=2).layer_token > 0
