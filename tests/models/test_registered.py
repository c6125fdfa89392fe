"""attn_implementation="longctx" without `patch_model`: sdpa's attention, or refused by name; and no layout."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GPTJConfig,
    GptOssConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen2Config,
    StableLmConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.models.attention import OF_SDPA, longctx_attention_forward
from tests.builders.tiny_models import TINY, tiny_bloom, tiny_llama, tiny_mpt

IDS = torch.arange(18).reshape(2, 9) * 7 % 128
PADDED = torch.ones(2, 9, dtype=torch.long).index_put((torch.tensor([0, 0, 0]), torch.arange(3)), torch.tensor(0))
PACKED = Layout({0: (Segment(0, 0, 4), Segment(1, 0, 5))})
WHOLE = Layout({0: (Segment(0, 0, 9),)})
WINDOW = 5
"""Shorter than WHOLE."""
PREPARED_MASK = torch.empty(0, 0, 0, 0)
"""A mask that transformers takes as prepared: it builds none."""


def test_registration_alone_is_a_plain_model_until_it_is_patched(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    registered = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="longctx")
    assert torch.equal(registered(IDS).logits, tiny_llama()(IDS).logits)
    for part in (registered, registered.model):
        with pytest.raises(ValueError, match=r"not patched: .* Call hf_longctx.patch_model\(model\) first"):
            part(input_ids=IDS[:1], layout=PACKED)
    ours = patch_model(registered)(input_ids=IDS[:1], layout=PACKED).logits
    assert torch.equal(ours, patch_model(tiny_llama())(input_ids=IDS[:1], layout=PACKED).logits)


@pytest.mark.parametrize("make", [tiny_bloom, tiny_mpt])
def test_registration_alone_is_refused_for_alibi_models(make: Callable[..., Any]):
    """sdpa's mask would be added to their scores as zeros and ones, or be absent: not causal, silently."""
    model = make(attn_implementation="longctx").eval()
    with pytest.raises(
        ValueError, match=r"means nothing to a (bloom|mpt) model.* call hf_longctx.patch_model\(model\)"
    ):
        model(IDS)
    assert torch.equal(patch_model(model)(IDS).logits, make().eval()(IDS).logits)


def registered(config: Any) -> Any:
    """A model that has our attention by name only, every other weight as it comes; in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="longctx").eval()


QWEN2 = Qwen2Config(
    **(TINY | {"initializer_range": 0.3}),
    use_sliding_window=True,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"],
)
STABLELM = StableLmConfig(**TINY)
"""Its decoder layers take keywords and pass none on: attention never sees a layout."""


@pytest.mark.parametrize("config", [QWEN2, STABLELM], ids=["qwen2", "stablelm"])
def test_families_that_are_not_patched_are_plain_models_and_take_no_layout(config: Any):
    model = registered(config)
    with torch.no_grad():
        ours = model(IDS, attention_mask=PADDED, output_attentions=False, token_type_ids=torch.zeros_like(IDS)).logits
        model.set_attn_implementation("sdpa")
        right = model(IDS, attention_mask=PADDED).logits
        model.set_attn_implementation("longctx")
    assert torch.equal(ours, right)
    for arguments in ({}, {"position_ids": torch.arange(9)[None], "attention_mask": PREPARED_MASK, "use_cache": False}):
        with pytest.raises(ValueError, match=r"a layout came to \w+ForCausalLM.* Call hf_longctx.patch_model"):
            model(input_ids=IDS[:1], layout=WHOLE, **arguments)


SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            FalconConfig(**SMALL, num_attention_heads=2),
            "means nothing to FalconForCausalLM: .*FALCON_ATTENTION_CLASSES.* eager, sdpa",
        ),
        (
            GPTJConfig(vocab_size=32, n_embd=16, n_layer=1, n_head=2),
            "means nothing to GPTJForCausalLM: .* does not support",
        ),
        (MambaConfig(**SMALL), "means nothing to MambaForCausalLM: .* Valid: load it without attn_implementation"),
        (Gemma2Config(**TINY), "means nothing to Gemma2ForCausalLM: .* does not support"),
        (GptOssConfig(**TINY, num_local_experts=2), "means nothing to GptOssForCausalLM: .* does not support"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_classes_that_would_not_run_sdpa_under_our_name_are_refused_when_made(config: Any, message: str):
    """Without it: a KeyError (Falcon, GPT-J), a name that means nothing, or another function than the class needs."""
    with pytest.raises(ValueError, match=message):
        registered(config)


@pytest.mark.parametrize("layout", [None, WHOLE], ids=["", "layout"])
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"softcap": 30.0}, "softcap=30.0, which longctx attention does not know"),
        ({"s_aux": torch.ones(4)}, r"s_aux of shape \(4,\), which"),
        ({"sinks": torch.ones(4)}, r"sinks of shape \(4,\), which"),
        ({"indices": torch.ones(1, 9, 2)}, r"indices of shape \(1, 9, 2\), which"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_keywords_that_change_scores_are_refused(keywords: dict[str, Any], message: str, layout: Layout | None):
    """transformers' sdpa swallows what it does not know. None is no keyword: modeling code passes softcap=None."""
    attention, q = patch_model(tiny_llama()).model.layers[0].self_attn, torch.ones(1, 4, 9, 16)
    k = q[:, :2]
    with pytest.raises(ValueError, match=message):
        longctx_attention_forward(attention, q, k, k, None, layout=layout, **keywords)
    longctx_attention_forward(attention, q, k, k, None, layout=layout, **dict.fromkeys(keywords))


def test_keywords_of_the_loss_reach_it_through_the_attention_layers():
    """transformers hands one set of keywords to the base model and to the loss."""
    ids = torch.arange(9)[None] % 5
    keywords: dict[str, Any] = {"labels": ids, "shift_labels": ids, "ignore_index": 3}
    loss = patch_model(tiny_llama())(input_ids=ids, **keywords).loss
    torch.testing.assert_close(loss, tiny_llama()(input_ids=ids, **keywords).loss)
    with pytest.raises(ValueError, match=r"ignore_index=3 came with a layout: .* labels of -100 alone"):
        patch_model(tiny_llama())(input_ids=ids, layout=WHOLE, ignore_index=3)


def test_keywords_that_this_transformers_sdpa_does_not_name_are_not_swallowed():
    named = inspect.signature(sdpa_attention_forward).parameters
    for name in ("position_bias", "cache", "kwargs", "softcap"):
        assert (name in OF_SDPA) == (name in named and name != "kwargs")


@pytest.mark.parametrize(
    "keywords",
    [{"position_bias": torch.ones(1, 4, 9, 9)}, {"is_causal": False}, {"cu_seq_lens_q": torch.tensor([0, 9])}],
)
def test_what_sdpa_honours_is_refused_with_a_layout_alone(keywords: dict[str, Any]):
    attention, q = patch_model(tiny_llama()).model.layers[0].self_attn, torch.ones(1, 4, 9, 16)
    k = q[:, :2]
    longctx_attention_forward(attention, q, k, k, None, **keywords)
    with pytest.raises(ValueError, match=f"{next(iter(keywords))}.* does not know with a layout"):
        longctx_attention_forward(attention, q, k, k, None, layout=WHOLE, **keywords)
