"""Decoders of any family: certified by a tiny copy, and trained as a loop over documents with the plain model trains them."""

import itertools
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
    JetMoeConfig,
    JetMoeForCausalLM,
    PreTrainedModel,
)
from transformers.models.qwen3 import modeling_qwen3

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.certificate import certificate_for, certificate_of
from hf_longctx.layouts.layout import LayoutError
from hf_longctx.models.document_wise import Pieces
from hf_longctx.models.general import drop_nothing, needs_own_logits, refuse_unreachable
from hf_longctx.models.loss.head_check import OtherLoss
from hf_longctx.planner import GlobalBatches
from tests.builders.tiny_models import GENERAL, tiny_general, tiny_mixtral
from tests.builders.training.sharded_runs import CAPACITY, run
from tests.builders.training_runs import documents, reference
from tests.worlds.rank_pool import RankPool

LENGTHS = [60, 9, 23, 5, 31, 12, 17, 38]
STEPS = 2
SPLIT = [family for family in GENERAL if family != "qwen3_next"]
"""Families whose documents may lie on several ranks."""


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


def test_a_balancing_loss_whose_weight_has_another_name():
    """JetMoE's plain model was said not to run: the certificate multiplied by a weight that its configuration does not have."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "kv_channels": 16,
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "aux_loss_coef": 0.5}
    model = JetMoeForCausalLM(JetMoeConfig(vocab_size=128, **sizes, **experts))
    ids = torch.arange(1, 31)[None]
    plain = float(model(ids, labels=ids, use_cache=False).loss)
    shift_labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
    call = {"layout": Layout({0: (Segment(0, 0, 30),)}), "num_items_in_batch": 29, "num_tokens_in_batch": 30}
    patched = patch_model(model)(input_ids=ids, shift_labels=shift_labels, **call).loss
    assert float(patched) == pytest.approx(plain, rel=1e-6)


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
    drop_nothing(config)
    assert getattr(getattr(config, part), field) == (0.1 if "jitter" in field else 0), "noise of routers stays"


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


def test_embeddings_may_be_in_another_dtype_than_the_head():
    model = tiny_general("qwen3", torch.float32, tie_word_embeddings=False)
    model.get_input_embeddings().bfloat16()
    ids = torch.arange(23)[None]
    right = model(input_ids=ids, labels=ids, use_cache=False).loss
    patch_model(model)
    loss = model(
        input_ids=ids,
        layout=Layout({0: (Segment(0, 0, 23),)}),
        shift_labels=torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100),
        num_items_in_batch=22,
        num_tokens_in_batch=23,
    ).loss
    torch.testing.assert_close(loss.float(), right.float())


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
