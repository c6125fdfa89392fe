"""Certificates of models with a planted fault: each fault is found, and avoided or refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3ForCausalLM,
    StableLmConfig,
)
from transformers.models.qwen3 import modeling_qwen3

from hf_longctx import patch_model
from hf_longctx.attention.kept import KeptAttention
from hf_longctx.certificate import certificate_for, certificate_of
from hf_longctx.certificate.tiny_model import causal_lm_class
from hf_longctx.models import attention
from tests.builders.tiny_models import TINY, tiny_general


@pytest.fixture
def no_certificates_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Neither in this process nor on disk, so that each planted fault is looked for."""
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hf_longctx.certificate.certificate._CERTIFICATES", {})


class MaskIgnored(Qwen3ForCausalLM):
    """Whose layers get no mask, and see later tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self._with_another, with_kwargs=True)

    def _with_another(self, module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"attention_mask": self._mask(args[0])}

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None


class MaskOfItsOwn(MaskIgnored):
    """Whose layers get a causal mask that knows of no layout."""

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return torch.full((1, 1, hidden.shape[1], hidden.shape[1]), -torch.inf, dtype=hidden.dtype).triu(1)


class OverRows(LlamaForCausalLM):
    """Which adds the mean of all rows of the call: another sum on each rank, and of each document."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(
            lambda module, args, output: output + output.mean(1, keepdim=True)
        )


class LargestPosition(Qwen3ForCausalLM):
    """Whose rotation depends on the largest position of the call."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        rotary = self.model.rotary_emb
        own = rotary.forward
        rotary.forward = lambda x, position_ids: own(x, position_ids * (1 + position_ids.max() % 5))  # type: ignore[method-assign]


class CastingMLP(modeling_qwen3.Qwen3MLP):
    """Which computes in float32, and says so in a way that `float64_throughout` does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (
            layer.weight.type("torch.FloatTensor") for layer in (self.gate_proj, self.up_proj, self.down_proj)
        )
        narrow = x.type("torch.FloatTensor")
        inner = self.act_fn(torch.nn.functional.linear(narrow, gate)) * torch.nn.functional.linear(narrow, up)
        return torch.nn.functional.linear(inner, down).to(x.dtype)


class Casting(Qwen3ForCausalLM):
    """Whose first MLP computes in float32."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].mlp = CastingMLP(config)


class NormOverRows(Qwen3ForCausalLM):
    """Whose embeddings are divided by their size over the call's rows: statistics of a batch."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(
            lambda module, args, output: output / output.square().mean((0, 1)).add(1e-6).sqrt()
        )


class LimitedMLP(modeling_qwen3.Qwen3MLP):
    """Which leaves out rows beyond half of the call's, as experts with a capacity do: those with the lowest scores."""

    def _taken(self, scores: torch.Tensor) -> torch.Tensor:
        """bool [1, T]"""
        most = -(-scores.shape[1] // 2)
        return scores >= scores.topk(most).values[:, -1:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self._taken(x.sum(-1))[..., None]


class FirstComeMLP(LimitedMLP):
    """Which leaves out the last of those with a positive score instead, so that no later token matters."""

    def _taken(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores > 0) & ((scores > 0).cumsum(1) <= -(-scores.shape[1] // 4))


class LimitedExperts(Qwen3ForCausalLM):
    """Whose first MLP has a capacity."""

    mlp = LimitedMLP

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].mlp = self.mlp(config)


class FirstComeExperts(LimitedExperts):
    mlp = FirstComeMLP


class PositionsOfTheCall(Qwen3ForCausalLM):
    """Whose positions are those given, scaled down once the call has more rows than were trained with."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        rotary = self.model.rotary_emb
        own = rotary.forward
        rotary.forward = lambda x, position_ids: own(x, position_ids * min(1.0, 16 / x.shape[1]))  # type: ignore[method-assign]


def model_of(cls: Any) -> Any:
    """One of the classes above, with Qwen3's attention, which stays transformers' own, or Llama's, which becomes ours."""
    one_layer = {"num_hidden_layers": 1}
    general = issubclass(cls, Qwen3ForCausalLM)
    return cls(tiny_general("qwen3", **one_layer).config if general else LlamaConfig(**(TINY | one_layer)))


@pytest.mark.parametrize("cls", [MaskIgnored, OverRows, NormOverRows, LimitedExperts])
def test_a_model_that_sees_later_tokens_is_no_decoder(cls: Any):
    certificate = certificate_of(model_of(cls))
    assert not certificate.exact
    assert certificate.tested, certificate.reason
    assert "depend on later tokens" in certificate.reason


@pytest.mark.parametrize(
    ("cls", "reason", "traits"),
    [
        (MaskOfItsOwn, "the layout has not reached Qwen3Attention", {"in_masks": False, "alone": False}),
        (LargestPosition, "differs by", {"in_masks": False, "alone": True}),
        (PositionsOfTheCall, "differs by", {"in_masks": False, "alone": True}),
    ],
)
def test_a_planted_fault_is_found_and_avoided(cls: Any, reason: str, traits: dict[str, bool]):
    """Attention with a mask of its own is exact document by document; positions by the whole call, one document to a call."""
    certificate = certificate_of(model_of(cls))
    assert certificate.exact
    assert reason in certificate.reason
    assert {name: getattr(certificate.traits, name) for name in traits} == traits


def test_experts_with_a_capacity_are_those_of_a_whole_document():
    """On each document alone, as the plain model has it, the capacity is that of the document."""
    certificate = certificate_of(model_of(FirstComeExperts))
    assert certificate.exact, certificate.reason
    assert [name.rsplit(".", 1)[-1] for name in certificate.traits.document_wise] == ["FirstComeMLP"]


def test_a_planted_fault_refuses_the_model():
    model = model_of(MaskIgnored)
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(
        ValueError, match=r"MaskIgnored is not computed exactly over layouts: its logits depend on later tokens"
    ):
        patch_model(model)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert not attention.is_patched(model)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("a dropped sink", lambda features: features | {"sinks": None}),
        ("a dropped window", lambda features: features | {"window": None}),
        ("another scale", lambda features: features | {"scale": 0.3}),
    ],
)
def test_a_fault_of_ours_is_found(name: str, planted: Any, monkeypatch: pytest.MonkeyPatch, no_certificates_yet: None):
    # As it would be, if a feature of a family were lost on the way to the engine.
    own = attention._over_layout

    def lossy(module: Any, tensors: Any, call: Any, dropout: Any, position_ids: Any, **features: Any) -> Any:
        return own(module, tensors, call, dropout, position_ids, **planted(features))

    monkeypatch.setattr(attention, "_over_layout", lossy)
    certificate = certificate_of(tiny_general("gpt_oss", num_hidden_layers=1, layer_types=["sliding_attention"]))
    assert "differs by" in certificate.reason, name
    assert not certificate.traits.in_masks, "what is exact then is attention of the model's own, document by document"


def test_attention_that_is_kept_for_the_wrong_call_is_found(monkeypatch: pytest.MonkeyPatch, no_certificates_yet: None):
    """A layer of DiffLlama calls attention twice; the second call was given what is kept of the first."""
    own = KeptAttention.once

    def first_of_all(self: Any, compute: Any) -> Any:
        return tuple(self._kept[0]) if self._kept else own(self, compute)

    monkeypatch.setattr(KeptAttention, "once", first_of_all)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DiffLlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)
    certificate = certificate_for(DiffLlamaForCausalLM, config)
    assert "with activation checkpointing differs by" in certificate.reason


def test_an_error_of_a_millionth_is_found(monkeypatch: pytest.MonkeyPatch, no_certificates_yet: None):
    # Where nothing casts to float32, which could round so much.
    own = attention._over_layout
    monkeypatch.setattr(
        attention, "_over_layout", lambda *args, **features: (own(*args, **features)[0] * (1 + 1e-7), None)
    )
    certificate = certificate_for(Qwen3ForCausalLM, tiny_general("qwen3").config)
    assert not certificate.traits.in_masks
    assert "differs by" in certificate.reason


def test_rounding_of_a_cast_is_allowed_and_named(no_certificates_yet: None):
    certificate = certificate_of(model_of(Casting))
    assert certificate.exact, certificate.reason
    assert certificate.traits.splits_documents
    assert 1e-9 < certificate.error < 1e-6
    assert certificate.casts == ("type",)
    assert "float64 but for casts in type, tiny copy" in str(certificate)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            StableLmConfig(
                **TINY, rope_parameters={"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
            ),
            r"runs as a plain model.*With all of its sizes, in few layers: RuntimeError: The size of tensor a \(4\)",
        ),
        (
            GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=128, reorder_and_upcast_attn=True),
            "runs in float32 and refuses float64.*Error with upcasting.* set it to False",
        ),
    ],
    ids=["StableLM", "GPT-2"],
)
def test_a_plain_model_that_does_not_run_is_the_reason(config: Any, message: str):
    """StableLM rotates a part of its heads, for which this kind of RoPE gives all frequencies; GPT-2 looks for float32."""
    certificate = certificate_for(causal_lm_class(config), config)
    assert not certificate.tested
    assert re.search(message, certificate.refusal, re.DOTALL), certificate.refusal


def test_a_state_that_leaks_is_found(monkeypatch: pytest.MonkeyPatch, no_certificates_yet: None):
    # Where modules are not asked what they do.
    monkeypatch.setattr("hf_longctx.certificate.certificate.classes_by_document", lambda *args: ())
    certificate = certificate_of(tiny_general("qwen3_next"))
    assert certificate.traits.alone, "what is exact then is one document to a call"
    assert "differs by" in certificate.reason or "logits depend on" in certificate.reason
