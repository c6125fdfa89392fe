"""Decoders of any family: certified by a tiny copy, and trained as a loop over documents with the plain model trains them."""

import itertools
import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DbrxConfig,
    DbrxForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
    StableLmConfig,
)
from transformers.models.qwen3 import modeling_qwen3

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.certificate import certificate_for, certificate_of
from hf_longctx.certificate.tiny_model import causal_lm_class
from hf_longctx.layouts.layout import LayoutError
from hf_longctx.models import attention, layout_mask
from hf_longctx.models.document_wise import Pieces
from hf_longctx.models.general import needs_own_logits, refuse_unreachable
from hf_longctx.models.loss.head_check import OtherLoss
from hf_longctx.planner import GlobalBatches
from tests.builders.tiny_models import GENERAL, TINY, tiny_general, tiny_mixtral
from tests.builders.training.sharded_runs import CAPACITY, run
from tests.builders.training_runs import documents, reference
from tests.worlds.rank_pool import RankPool

LENGTHS = [60, 9, 23, 5, 31, 12, 17, 38]
STEPS = 2
SPLIT = [family for family in GENERAL if family != "qwen3_next"]
"""Families whose documents may lie on several ranks."""


@pytest.fixture
def no_certificates_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Neither in this process nor on disk, so that each planted fault is looked for."""
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hf_longctx.certificate.certificate._CERTIFICATES", {})


@pytest.mark.parametrize("family", GENERAL)
def test_a_family_is_certified_to_rounding(family: str):
    certificate = certificate_of(tiny_general(family))
    assert certificate.exact, certificate.reason
    assert certificate.error < 1e-12
    by_document = [name.rsplit(".", 1)[-1] for name in certificate.traits.document_wise]
    assert by_document == (["Qwen3NextGatedDeltaNet"] if family == "qwen3_next" else [])


def shardings() -> Iterator[Any]:
    """Each family with each of them; by default as few as hold masks, sinks and narrow values once and each sharding once."""
    usual = {("qwen3", "zero3"), ("gpt_oss", "zero1"), ("deepseek_v3", "auto")}
    for both in itertools.product(SPLIT, ("auto", "zero1", "zero3")):
        yield pytest.param(*both, marks=() if both in usual else pytest.mark.nightly)


@pytest.mark.processes
@pytest.mark.parametrize(("family", "sharding"), shardings())
def test_two_ranks_train_a_family_as_a_loop_over_documents(
    ranks2: RankPool, family: str, sharding: str, tmp_path: Path
):
    """With activation checkpointing; the longest documents are split. benchmarks/most_used.py does so with forty families."""
    runs = ranks2.run(
        run, str(tmp_path), model=family, sharding=sharding, checkpointing=True, lengths=LENGTHS, steps=STEPS
    )
    rows = documents(LENGTHS, labels=True)
    batches = GlobalBatches(np.array(LENGTHS), 3, documents=4)
    settings = {"output_dir": str(tmp_path), "max_steps": STEPS}
    losses, norms, _ = reference(family, rows, batches, 1, settings)
    for trained in runs:
        assert trained.series("loss") == pytest.approx(losses[:STEPS], rel=1e-4)
        assert trained.series("grad_norm") == pytest.approx(norms[:STEPS], rel=1e-3)
    assert max(LENGTHS) > CAPACITY, "no document is split"


@pytest.mark.processes
def test_a_family_with_states_trains_on_whole_documents(ranks2: RankPool, tmp_path: Path):
    lengths = [min(length, CAPACITY) for length in LENGTHS]
    runs = ranks2.run(run, str(tmp_path), model="qwen3_next", checkpointing=True, lengths=lengths, steps=1)
    settings = {"output_dir": str(tmp_path), "max_steps": 1}
    batches = GlobalBatches(np.array(lengths), 3, documents=4)
    losses, norms, _ = reference("qwen3_next", documents(lengths, labels=True), batches, 1, settings)
    for trained in runs:
        assert trained.series("loss") == pytest.approx(losses[:1], rel=1e-4)
        assert trained.series("grad_norm") == pytest.approx(norms[:1], rel=1e-3)


@pytest.mark.parametrize(("family", "field"), [("qwen3", "attention_dropout"), ("qwen3", "router_jitter_noise")])
def test_what_is_drawn_at_random_is_refused_by_its_field(family: str, field: str):
    """The tiny copy draws nothing."""
    with pytest.raises(ValueError, match=rf"{field}=0\.1: .* Set config\.{field} = 0\.0"):
        patch_model(tiny_general(family, **{field: 0.1}))


def test_a_router_that_draws_is_refused_in_a_family_with_attention_of_ours_too():
    with pytest.raises(ValueError, match=r"router_jitter_noise=0\.1: .* Set config\.router_jitter_noise = 0\.0"):
        patch_model(tiny_mixtral(router_jitter_noise=0.1))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_a_term_that_a_class_adds_to_its_loss_is_refused(z_loss: float):
    """It was taken for other logits, so that the cross-entropy alone was learned."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "attn_layer_indices": [1]}
    config = BambaConfig(vocab_size=128, intermediate_size=32, z_loss_coefficient=z_loss, **sizes, **mamba)
    model = BambaForCausalLM(config)
    with pytest.raises(OtherLoss, match="a term of its own") if z_loss else nullcontext():
        assert needs_own_logits(model) is False


@pytest.mark.parametrize(("part", "field"), [("ffn_config", "moe_jitter_eps"), ("attn_config", "attn_pdrop")])
def test_what_is_drawn_at_random_is_refused_in_a_configuration_inside_too(part: str, field: str):
    sizes = {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32},
    }
    sizes[part] |= {field: 0.1}
    config = DbrxConfig(d_model=64, n_heads=4, n_layers=1, vocab_size=128, **sizes)
    with pytest.raises(ValueError, match=rf"{part}\.{field}=0\.1: .* Set config\.{part}\.{field} = 0\.0"):
        refuse_unreachable(DbrxForCausalLM(config))


def checkpointed(forward: Any, reentrant: bool) -> Any:
    """Checkpoint a layer as torch does it, which takes keywords in one way only."""
    return lambda *args, **kwargs: checkpoint(partial(forward, **kwargs), *args, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_with_a_state_that_others_checkpoint_are_refused_in_backward(reentrant: bool):
    """Such a recomputation has no layout: all rows would be one document."""
    model = patch_model(tiny_general("qwen3_next")).train()
    for layer in model.model.layers:
        layer.forward = checkpointed(layer.forward, reentrant)
    loss = model(
        input_ids=torch.arange(16)[None] + 5,
        layout=Layout({0: (Segment(0, 0, 9), Segment(1, 0, 7))}),
        shift_labels=torch.full((1, 16), 3),
        num_items_in_batch=16,
    ).loss
    model(input_ids=torch.arange(16)[None] + 5)  # in between, and without a layout
    with pytest.raises(LayoutError, match="Qwen3NextGatedDeltaNet is computed again in backward without its layout"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_with_and_without_a_layout_are_recomputed_as_they_were(reentrant: bool):
    """Layers with a state, whose backwards come after all forwards."""
    ids = torch.arange(16)[None] * 5 % 120
    layout = Layout({0: (Segment(0, 0, 9), Segment(1, 0, 7))})
    keywords: dict[str, Any] = {"shift_labels": ids, "num_items_in_batch": 16}

    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        model = patch_model(tiny_general("qwen3_next", torch.float64))
        model.get_input_embeddings().weight.requires_grad_(True)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        over_layout = model(input_ids=ids, layout=layout, **keywords).loss
        plain = model(input_ids=ids, labels=ids, use_cache=False).loss
        for loss in (over_layout, 3 * plain):
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for gradient, right in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(gradient, right)


class WithoutBase(PreTrainedModel):
    """A causal language model in one piece."""

    config_class = DbrxConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = torch.nn.Linear(64, 128)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


def test_a_model_without_a_base_model_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"no part of WithoutBase .* \(it has no base model"):
        refuse_unreachable(WithoutBase(DbrxConfig(hidden_size=64)))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_the_router_loss_is_that_of_each_document(family: str):
    model = tiny_general(family, torch.float64, output_router_logits=True, router_aux_loss_coef=0.5)
    ids = [torch.arange(length) * 7 % 120 for length in (23, 9)]
    losses = [model(input_ids=document[None], labels=document[None], use_cache=False).aux_loss for document in ids]
    right = 0.5 * sum(loss * len(document) for loss, document in zip(losses, ids)) / 32
    mean = patch_model(model)(
        input_ids=torch.cat(ids)[None],
        layout=Layout({0: (Segment(0, 0, 23), Segment(1, 0, 9))}),
        shift_labels=torch.full((1, 32), 3),
        num_items_in_batch=32,
        num_tokens_in_batch=32,
    ).aux_loss
    assert torch.allclose(mean.double(), right.double(), rtol=1e-5)


def test_a_router_loss_that_there_is_not_is_refused():
    model = patch_model(tiny_general("deepseek_v3"))
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM has no load-balancing loss as Mixtral's"):
        model(
            input_ids=torch.arange(9)[None],
            layout=Layout({0: (Segment(0, 0, 9),)}),
            shift_labels=torch.arange(9)[None],
            num_items_in_batch=9,
            num_tokens_in_batch=9,
            output_router_logits=True,
        )


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


@pytest.mark.parametrize(
    ("seen", "local_size", "pattern"),
    [
        (lambda q, k: k <= q, None, layout_mask.Pattern()),
        (lambda q, k: (k <= q) & (k > q - 5), 5, layout_mask.Pattern(window=5)),
        (lambda q, k: (k <= q) & (k // 4 == q // 4), 4, layout_mask.Pattern(chunk=4)),
        (lambda q, k: k >= 0, None, None),
        (lambda q, k: (k <= q) | (k < 3), None, None),
        (lambda q, k: (k <= q) & (k > q - 4), 5, None),
    ],
)
def test_what_a_mask_means_is_asked(seen: Any, local_size: int | None, pattern: Any):
    def function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return seen(query, key)

    if pattern is None:
        with pytest.raises(ValueError, match="neither causal, a window nor chunks"):
            layout_mask.pattern_of(function, local_size, 100)
    else:
        assert layout_mask.pattern_of(function, local_size, 100) == pattern


def test_whoever_computes_with_a_mask_is_named():
    call = layout_mask.LayoutCall(Layout({0: (Segment(0, 0, 6),)}))
    mask = layout_mask.LayoutMask.of(call, layout_mask.Pattern())
    assert mask.shape == (1, 1, 6, 6)
    with torch._C.DisableTorchFunctionSubclass():
        assert mask.untyped_storage().nbytes() == 1
    assert mask.to(torch.float32) is mask
    for compute in (
        lambda: mask + 1,
        lambda: mask[0],
        lambda: torch.cat([mask, mask]),
        lambda: torch.where(mask, 1, 0),
    ):
        with pytest.raises(ValueError, match=r"computes with its attention mask \(torch function"):
            compute()


def test_a_patched_family_is_plain_without_a_layout():
    """Also where transformers has no sdpa for it."""
    ids = torch.arange(12)[None] + 5
    for family in ("qwen3", "gpt_oss", "gemma2"):
        model = tiny_general(family, torch.float64).eval()
        with torch.no_grad():
            right = model(input_ids=ids).logits
            logits = patch_model(model)(input_ids=ids).logits
        assert torch.allclose(logits, right, atol=1e-5)  # eager attention has its softmax in float32
    assert modeling_qwen3.Qwen3Attention is type(patch_model(tiny_general("qwen3")).model.layers[0].self_attn)


def test_layers_hand_on_keys_that_were_chosen_of_short_and_of_long_documents():
    # Of a document of two tokens two keys are chosen, of longer ones three: no one tensor holds both.
    certificate = certificate_for(GlmMoeDsaForCausalLM, GlmMoeDsaConfig())
    assert certificate.exact, certificate.reason
    assert not certificate.traits.alone
    assert certificate.error < 1e-12
    value = Pieces((torch.zeros(1, 2, 2), torch.zeros(1, 3, 3)))
    with pytest.raises(TypeError):
        value + 1  # type: ignore[operator]
