"""Who may reach the chunked loss: models whose logits are their head's and whose loss is the cross-entropy of these. The others
are refused by name, families of transformers by their configurations, and classes of nobody's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GraniteConfig,
    LlamaForCausalLM,
    Olmo2Config,
    XLNetConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from hf_longctx import Layout, LongContextPlugin, LongContextTrainer, Segment, patch_model
from hf_longctx.models.attention import LayoutAttention
from hf_longctx.models.loss.head import LayoutForward
from hf_longctx.models.loss.head_check import refuse_other_logits
from tests.builders.tiny_models import FAMILIES, TINY, tiny_llama
from tests.builders.training_runs import arguments, documents, fresh_accelerator_state

AFTER = "changes its logits after the head"
BEFORE = "changes hidden states before its head"


def made(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_families_that_are_trained_pass_and_stay_as_they_are(make: Callable[..., Any], device: str):
    model = make(torch.bfloat16).eval().to(device)
    before = {name: id(module) for name, module in model.named_modules()}
    random = torch.get_rng_state()
    refuse_other_logits(model)
    refuse_other_logits(patch_model(model))
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GraniteConfig(**TINY), None),
        (GraniteConfig(**TINY, logits_scaling=8.0), f"GraniteForCausalLM {AFTER}"),
        (CohereConfig(**TINY), f"CohereForCausalLM {AFTER}"),
        (Gemma2Config(**TINY), f"Gemma2ForCausalLM {AFTER}"),
        (Gemma2Config(**TINY, final_logit_softcapping=None), None),
        (
            FalconH1Config(**TINY, lm_head_multiplier=0.5, mamba_d_ssm=64, mamba_n_heads=4),
            f"FalconH1ForCausalLM {AFTER}",
        ),
        (BertConfig(**TINY, is_decoder=True), f"BertLMHeadModel {BEFORE}"),
        (XLNetConfig(vocab_size=128, d_model=16, n_layer=1, n_head=2, d_inner=16), None),
        (Olmo2Config(**TINY), None),
    ],
    ids=lambda value: value or "passes" if isinstance(value, str | None) else value.model_type,
)
def test_families_whose_logits_are_more_than_the_heads_are_refused_by_their_configuration(
    config: Any, message: str | None
):
    model = made(config)
    if message is None:
        refuse_other_logits(model)
        return
    with pytest.raises(ValueError, match=message):
        refuse_other_logits(model)


class Scaled(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 8
        return output


class Capped(LlamaForCausalLM):
    """Which a few logits near 0 would not show."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 1000 * torch.tanh(output.logits / 1000)
        return output


class Dropped(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, input_ids: Any = None, labels: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        output = self.model(input_ids, **kwargs)
        output.logits = self.lm_head(self.dropout(output.last_hidden_state))
        output.loss = None
        return output


class Transposed(LlamaForCausalLM):
    """A product with the embeddings: its head's own weight is never used."""

    def forward(self, input_ids: Any = None, labels: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        output = self.model(input_ids, **kwargs)
        output.logits = output.last_hidden_state @ self.model.embed_tokens.weight.t()
        output.loss = None
        return output


class Smoothed(LlamaForCausalLM):
    def loss_function(self, logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:  # type: ignore[override]
        return F.cross_entropy(logits[0, :-1].float(), labels[0, 1:], label_smoothing=0.1)


class Unlike(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("call generate")


class ScaledLinear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / 8


def of_class(cls: type) -> Any:
    model = tiny_llama()
    other = cls(model.config)
    other.load_state_dict(model.state_dict())
    return other


def with_scaled_head() -> Any:
    model = tiny_llama()
    model.lm_head.__class__ = ScaledLinear
    return model


def with_hook() -> Any:
    model = tiny_llama()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output / 8)
    return model


def with_set_forward() -> Any:
    model = tiny_llama()
    head = model.lm_head
    head.forward = lambda hidden: F.linear(hidden, head.weight) / 8  # type: ignore[method-assign]
    return model


def with_own_forward() -> Any:
    model = tiny_llama()
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    return model


def with_autocast() -> Any:
    fresh_accelerator_state()
    return Accelerator(cpu=True, mixed_precision="bf16").prepare_model(tiny_llama(), evaluation_mode=True)


def with_registered_attention() -> Any:
    AttentionInterface.register("somebodys", sdpa_attention_forward)
    model = tiny_llama()
    model.set_attn_implementation("somebodys")
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of_class(Scaled), "the loss of Scaled for a few tokens"),
        (lambda: of_class(Dropped).eval(), f"Dropped {BEFORE}.* Nor can its own forward"),
        (lambda: of_class(Smoothed), "the loss of Smoothed .*label smoothing"),
        (lambda: of_class(Unlike), "what Unlike makes of hidden states cannot be followed .*call generate"),
        (with_scaled_head, "the output head is a ScaledLinear with a forward of its own"),
        (with_hook, "a hook or a forward set on it"),
        (with_set_forward, "a hook or a forward set on it"),
        (with_own_forward, "forward was set on this LlamaForCausalLM, .* set after patch_model"),
        (with_autocast, "forward was set on this LlamaForCausalLM, .* before accelerator.prepare_model"),
        (with_registered_attention, "attention function 'somebodys' was registered by somebody"),
    ],
)
def test_no_class_hook_or_head_of_somebody_elses_reaches_the_chunked_loss(make: Callable[[], Any], message: str):
    """They have LlamaAttention, so that their layers alone would be patched, and would train on other logits."""
    model = make()
    with pytest.raises(ValueError, match=message):
        patch_model(model)
    assert not any(isinstance(module, LayoutAttention) for module in model.modules())


@pytest.mark.parametrize("chunk_tokens", [3, 1000])
@pytest.mark.parametrize("cls", [Capped, Transposed])
def test_the_loss_of_other_logits_is_computed_by_the_class_itself(cls: type, chunk_tokens: int):
    """A chunk of rows at a time, documents packed, beside the plain model on each document alone."""
    plain, patched = of_class(cls).double(), patch_model(of_class(cls).double(), loss_chunk_tokens=chunk_tokens)
    documents = [torch.arange(9) * 5 % 120, torch.arange(4) * 7 % 120]
    losses: Any = [
        F.cross_entropy(plain(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum") for ids in documents
    ]
    sum(losses).backward()
    shifted = torch.cat([torch.cat([ids[1:], torch.tensor([-100])]) for ids in documents])
    loss = patched(
        input_ids=torch.cat(documents)[None],
        layout=Layout({0: (Segment(0, 0, 9), Segment(1, 0, 4))}),
        shift_labels=shifted[None],
        num_items_in_batch=1,
    ).loss
    loss.backward()
    assert loss.item() == pytest.approx(sum(losses).item(), rel=1e-9)
    for (name, right), parameter in zip(plain.named_parameters(), patched.parameters()):
        if right.grad is not None:
            assert torch.allclose(parameter.grad, right.grad, rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("cls", [Smoothed, LlamaForCausalLM])
def test_the_loss_of_a_class_counts_where_its_head_has_more_rows_than_the_vocabulary(cls: type):
    model = of_class(cls)
    model.set_output_embeddings(torch.nn.Linear(TINY["hidden_size"], TINY["vocab_size"] + 64, bias=False))
    if cls is LlamaForCausalLM:
        refuse_other_logits(model)
        return
    with pytest.raises(ValueError, match="the loss of Smoothed"):
        refuse_other_logits(model)


def test_a_trainer_takes_off_the_autocast_of_another_one(tmp_path):
    model = with_autocast()
    trainer = LongContextTrainer(
        model,
        arguments(tmp_path, max_steps=1),
        train_dataset=documents([7, 5, 9]),
        plugin=LongContextPlugin(capacity=32),
    )
    assert np.isfinite(trainer.train().training_loss)
    assert isinstance(vars(model)["forward"], LayoutForward)
    assert not hasattr(model, "_original_forward")


def test_what_changes_no_logits_is_let_through():
    on_a_device = add_hook_to_module(
        tiny_llama(), AlignDevicesHook(io_same_device=True)
    )  # as bitsandbytes' models have
    assert patch_model(on_a_device) is on_a_device
    model = of_class(type("Named", (LlamaForCausalLM,), {}))
    model.lm_head.register_forward_hook(lambda module, inputs, output: None)  # looks
    model.lm_head.bias = torch.nn.Parameter(torch.ones(128))
    assert patch_model(model) is model
