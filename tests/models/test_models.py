"""Patched models: ordinary without a layout, exact with one, and clear about what they cannot do."""

import copy
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2Model,
)
from transformers.models.llama.modeling_llama import LlamaModel

import hf_longctx
from hf_longctx import Layout, LongContextLlamaAttention, Segment, patch_model
from hf_longctx.models.attention import LayoutAttention
from hf_longctx.models.stages import cut_model
from tests.builders.plain_reference import reference_loss
from tests.builders.tiny_models import tiny_bloom, tiny_llama, tiny_mistral, tiny_mixtral, tiny_mpt

IDS = torch.arange(18).reshape(2, 9) * 7 % 128
PADDED = torch.ones(2, 9, dtype=torch.long).index_put((torch.tensor([0, 0, 0]), torch.arange(3)), torch.tensor(0))
PACKED = Layout({0: (Segment(0, 0, 4), Segment(1, 0, 5))})
DEFAULT_ROPE = {"rope_theta": 10000.0}

FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "mixtral": tiny_mixtral,
    "bloom": tiny_bloom,
    "mpt": tiny_mpt,
}


@pytest.fixture(params=FAMILIES)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """(patched, plain) with the same weights, in evaluation mode."""
    make = FAMILIES[request.param]
    return patch_model(make()).eval(), make().eval()


@pytest.mark.parametrize("mask", [None, PADDED], ids=["no mask", "padded"])
def test_without_a_layout_a_patched_model_is_the_plain_one(models: tuple[Any, Any], mask: torch.Tensor | None):
    patched, plain = models
    ours, right = (model(IDS, attention_mask=mask, labels=IDS) for model in models)
    assert torch.equal(ours.logits, right.logits)
    assert torch.equal(ours.loss, right.loss)
    pad: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(IDS) if mask is None else mask,
    }
    assert torch.equal(patched.generate(IDS, **pad), plain.generate(IDS, **pad))


def test_a_deep_copy_runs_its_own_weights(models: tuple[Any, Any]):
    patched, plain = models
    other = copy.deepcopy(patched)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert not other(IDS).logits.any()
    assert torch.equal(patched(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_attention_classes_are_replaced_in_place(make: Callable[..., Any]):
    model = make()
    parameters = dict(model.named_parameters())
    assert patch_model(model, kernel="reference", keep_last_slice=True) is model
    assert patch_model(model, loss_chunk_tokens=8) is model  # twice changes settings only
    attention = [module for module in model.modules() if isinstance(module, LayoutAttention)]
    assert len(attention) == 2
    assert {(module.longctx_kernel, module.longctx_keep_last_slice) for module in attention} == {("auto", False)}
    patch_model(model, keep_last_slice=True)
    assert all(module.longctx_keep_last_slice for module in attention)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())


def test_logits_of_packed_documents(models: tuple[Any, Any]):
    patched, plain = models
    with torch.no_grad():
        ours = patched(input_ids=IDS[:1], layout=PACKED).logits[0]
        right = torch.cat([plain(part).logits[0] for part in IDS[:1].split([4, 5], dim=1)])
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_is_a_plain_one(models: tuple[Any, Any], tmp_path):
    patched, plain = models
    patched.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    assert "longctx" not in config.lower()
    assert json.loads(config)["architectures"] == [type(plain).__name__]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(IDS).logits, patched(IDS).logits)
    again = hf_longctx.from_pretrained(str(tmp_path), kernel="reference")
    assert torch.equal(again.eval()(IDS).logits, patched(IDS).logits)


def test_the_loss_of_packed_documents_under_autocast():
    """bfloat16 autocast, weights in float32: within 2 % of the float32 loss (8 bits of mantissa), gradients in float32."""
    model = patch_model(tiny_llama())
    labels = torch.cat([torch.cat([part[1:], torch.tensor([-100])]) for part in IDS[0].split([4, 5])])[None]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=IDS[:1], layout=PACKED, shift_labels=labels, num_items_in_batch=7).loss
    loss.backward()
    right = reference_loss(tiny_llama(), [(part, part) for part in IDS[0].split([4, 5])], stock=True)
    assert loss.item() == pytest.approx(right.item(), rel=2e-2)
    assert {getattr(parameter.grad, "dtype", None) for parameter in model.parameters()} == {torch.float32}


def cache_of_three() -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), layer)
    return cache


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"attention_mask": torch.ones(1, 9)},
            r"attention_mask \(shape \(1, 9\)\) came with a layout.* Remove the mask",
        ),
        (
            {"past_key_values": cache_of_three()},
            "a cache of 3 tokens came with a layout.* remove the layout to generate",
        ),
        ({"labels": IDS[:1]}, r"labels came with a layout: a shard cannot shift them.* pass shift_labels"),
        ({"shift_labels": IDS[:1]}, "shift_labels came without num_items_in_batch.* pass that count"),
        ({"position_ids": torch.arange(9)[None]}, "are not the positions of this rank's tokens in their documents"),
        ({"input_ids": IDS[:1, :5]}, r"input_ids has shape \(1, 5\), but rank 0 holds 9 tokens.* pass \[1, 9\]"),
    ],
)
def test_what_a_layout_cannot_honour_is_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        patch_model(tiny_llama())(**({"input_ids": IDS[:1], "layout": PACKED} | arguments))


def test_an_empty_cache_is_no_cache():
    model = patch_model(tiny_llama())
    ours = model(input_ids=IDS[:1], layout=PACKED, past_key_values=DynamicCache(), use_cache=True).logits
    assert torch.equal(ours, model(input_ids=IDS[:1], layout=PACKED).logits)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: .* Set config.attention_dropout = 0.0"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0} | DEFAULT_ROPE},
            "rope_type='dynamic' scales by the largest position .* Valid: default, linear, llama3, yarn",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "factor": 2.0,
                }
                | DEFAULT_ROPE
            },
            "rope_type='longrope'",
        ),
    ],
)
def test_settings_that_depend_on_the_call_are_refused_when_patching(overrides: dict[str, Any], message: str):
    model = tiny_llama(**overrides)
    with pytest.raises(ValueError, match=message):
        patch_model(model)
    assert not any(isinstance(module, LongContextLlamaAttention) for module in model.modules())  # unchanged


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tiny_bloom(attention_dropout=0.1),
            "attention_dropout=0.1: .* Set config.attention_dropout = 0.0",
        ),
        (
            lambda: tiny_mpt(attn_config={"attn_pdrop": 1}),
            "attn_config.attn_pdrop=1: .* Set config.attn_config.attn_pdrop = 0.0",
        ),
        (
            lambda: tiny_bloom(slow_but_exact=True, pretraining_tp=2),
            "slow_but_exact=True with pretraining_tp=2 .* Valid: config.slow_but_exact = False, or",
        ),
    ],
    ids=["bloom dropout", "mpt dropout", "bloom slices"],
)
def test_settings_of_alibi_models_are_refused_when_patching(make: Callable[[], Any], message: str):
    model = make()
    with pytest.raises(ValueError, match=message):
        patch_model(model)
    assert not any(isinstance(module, LayoutAttention) for module in model.modules())


class DropsKeywords(LlamaModel):
    def forward(self, input_ids: Any = None, layout: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs)


class CountsRows(LlamaModel):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **kwargs)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (DropsKeywords, "a layout has not reached LongContextLlamaAttention: .* passes no keywords on"),
        (CountsRows, "are not the positions of this rank's tokens in their documents"),
    ],
)
def test_base_models_that_keep_a_layout_or_its_positions_to_themselves_are_refused(base: type, message: str):
    model = tiny_llama()
    model.model.__class__ = base
    patch_model(model)(input_ids=IDS)  # ordinary without a layout
    with pytest.raises(ValueError, match=message):
        model(input_ids=IDS[:1], layout=PACKED)
    with pytest.raises(ValueError, match=f"pipeline_stages of a {base.__name__}"):
        cut_model(model, [range(1), range(1, 2)], [0])


def test_unknown_models_heads_and_settings_are_refused():
    with pytest.raises(ValueError, match=r"GPT2Model is no causal language model of transformers with an output head"):
        patch_model(GPT2Model(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)))
    wrapped = tiny_llama()
    wrapped.lm_head = torch.nn.Sequential(wrapped.lm_head)
    with pytest.raises(
        ValueError,
        match=r"the output head is a Sequential.* Valid: a torch.nn.Linear, or one with an adapter of PEFT's",
    ):
        patch_model(wrapped)
    with pytest.raises(ValueError, match="kernel='fast' is unknown; valid: auto"):
        patch_model(tiny_llama(), kernel="fast")
    with pytest.raises(ValueError, match="loss_chunk_tokens=0"):
        patch_model(tiny_llama(), loss_chunk_tokens=0)


@pytest.mark.processes
def test_importing_changes_nothing_for_other_models():
    """A model made after the import has transformers' own classes, functions and default attention."""
    program = (
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions\n"
        "before = dict(functions)\n"
        "import hf_longctx\n"
        "after = dict(functions)\n"
        "for name in ('longctx', 'longctx_eager'):\n"
        "    assert after.pop(name).__module__ == 'hf_longctx.models.attention'\n"
        "assert after == before\n"
        "from tests.builders.tiny_models import tiny_llama\n"
        "model = tiny_llama()\n"
        "assert {type(m).__module__.split('.')[0] for m in model.modules()} <= {'transformers', 'torch'}\n"
        "assert model.config._attn_implementation == 'sdpa'\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("family", ["llama", "bloom", "mpt"])
def test_a_pickled_model_still_runs_over_layouts(family: str):
    model = patch_model(FAMILIES[family](torch.float64)).eval()
    copied = pickle.loads(pickle.dumps(model))
    ids = torch.arange(12)[None]
    layout = Layout({0: [Segment(0, 0, 5), Segment(1, 0, 7)]})
    with torch.no_grad():
        logits = [patched(input_ids=ids, layout=layout).logits for patched in (model, copied)]
        plain = model(input_ids=ids).logits
    assert torch.equal(*logits)
    assert not torch.allclose(logits[0], plain)


@pytest.mark.parametrize(("model", "shown"), [("some/where", "'some/where'"), (None, "None"), ({}, "a dict")])
def test_what_is_no_loaded_model_is_refused_with_what_loads_one(model, shown):
    reason = (
        f"model is {shown}: it must be a causal language model that has been loaded. Valid: hf_longctx.from_pretrained"
    )
    with pytest.raises(TypeError, match=re.escape(reason)):
        patch_model(model)


def test_a_path_without_a_model_is_said_to_be_none(tmp_path):
    with pytest.raises(
        ValueError, match=r"nowhere' is no existing directory \(relative to .*\), and no hub's org/name"
    ):
        hf_longctx.from_pretrained(str(tmp_path / "nowhere"))
