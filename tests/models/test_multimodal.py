"""Text of a multimodal model with a supported language model inside: LLaVA and SmolVLM around Llama, Mistral 3 around Mistral."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from hf_longctx import Layout, LongContextPlugin, Segment, patch_model
from hf_longctx.planner import GlobalBatches
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.training.refusals import problems
from hf_longctx.training.request import Request, stated
from tests.builders.tiny_models import TINY
from tests.builders.training_runs import MODELS, documents, reference, train
from tests.worlds.rank_pool import RankPool

LENGTHS = (29, 8, 17)
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TEXT: dict[str, Any] = TINY | {"initializer_range": 0.3, "tie_word_embeddings": False}
IMAGE = TINY["vocab_size"] - 1
"""Token that stands for a part of an image."""


def tiny_llava() -> Any:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT), image_token_index=IMAGE
    )
    return seeded(LlavaForConditionalGeneration, config)


def tiny_mistral3() -> Any:
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**VISION),
        text_config=MistralConfig(**TEXT, sliding_window=12),
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    )
    return seeded(Mistral3ForConditionalGeneration, config)


def tiny_smolvlm() -> Any:
    config = SmolVLMConfig(vision_config=VISION, text_config=LlamaConfig(**TEXT), image_token_id=IMAGE)
    return seeded(SmolVLMForConditionalGeneration, config)


def tiny_gemma3() -> Any:
    """Make a model like Gemma 3 of 4B and more: its language model has transformers' own attention classes, windows and tied
    embeddings."""
    windows = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**VISION),
        text_config=Gemma3TextConfig(**TINY, **windows),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=IMAGE - 1,
        eoi_token_index=IMAGE - 2,
    )
    return seeded(Gemma3ForConditionalGeneration, config)


def seeded(cls: Any, config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls(config)


FAMILIES = {"llava": tiny_llava, "mistral3": tiny_mistral3, "smolvlm": tiny_smolvlm}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_text_trains_as_its_documents_alone(family: str):
    """float64, loss and the language model's gradients: 1e-9 relative."""
    model, plain = patch_model(FAMILIES[family]().double()), FAMILIES[family]().double()
    texts = [(torch.arange(length) * 37 + 11 * doc) % 120 for doc, length in enumerate(LENGTHS)]
    shifted = [torch.cat([ids[1:], torch.tensor([-100])]) for ids in texts]
    count = sum(LENGTHS) - len(LENGTHS)
    right = torch.zeros((), dtype=torch.float64)
    for ids, labels in zip(texts, shifted):
        logits = plain(input_ids=ids[None]).logits[0]
        right = right + torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / count
    right.backward()
    packed = Layout({0: tuple(Segment(doc, 0, length) for doc, length in enumerate(LENGTHS))})
    loss = model(
        input_ids=torch.cat(texts)[None],
        shift_labels=torch.cat(shifted)[None],
        layout=packed,
        num_items_in_batch=count,
    ).loss
    loss.backward()
    torch.testing.assert_close(loss, right, rtol=1e-9, atol=0)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        if theirs.grad is not None:
            assert (ours.grad - theirs.grad).abs().max() <= 1e-9 * theirs.grad.abs().max(), name
    assert (
        sum(parameter.grad is not None for parameter in model.parameters()) == 2 * 9 + 3
    )  # the language model's, all of them


@pytest.mark.parametrize("where", ["text_config", "config"])
def test_a_load_balancing_loss_is_added_where_the_class_adds_it(where: str):
    """GLM-4.5V asks the configuration of its language model, and ignores a field of that name outside. float32: 1e-5 relative."""
    config = Glm4vMoeConfig(
        text_config=TINY
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 1, "router_aux_loss_coef": 0.3, "pad_token_id": None}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "image_size": 28},
        **{
            f"{name}_token_id": 120 + number
            for number, name in enumerate(("image", "video", "image_start", "image_end"))
        },
    )
    (config.text_config if where == "text_config" else config).output_router_logits = True
    plain: Any = seeded(Glm4vMoeForConditionalGeneration, config).train()
    ids = (torch.arange(29) * 37)[None] % 120
    right = plain(input_ids=ids, labels=ids)
    model = patch_model(copy.deepcopy(plain))
    loss = model(
        input_ids=ids,
        shift_labels=torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100),
        layout=Layout({0: (Segment(0, 0, 29),)}),
        num_items_in_batch=28,
        num_tokens_in_batch=29,
    ).loss
    if where == "config":  # some releases ask neither of them
        assert right.aux_loss is None
    torch.testing.assert_close(loss, right.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_trains_text_with_the_losses_of_a_loop_over_documents(family: str, tmp_path: Path, monkeypatch):
    """float32, three steps of all documents: losses 1e-4 relative."""
    monkeypatch.setitem(MODELS, family, FAMILIES[family])
    rows = [{"input_ids": [token % IMAGE for token in row["input_ids"]]} for row in documents(LENGTHS)]
    settings = {"output_dir": str(tmp_path), "num_train_epochs": 3}
    losses, norms, weights = reference(family, rows, GlobalBatches(np.array(LENGTHS), 3, documents=3), 3, settings)
    plugin = {"capacity": 40, "global_batch_documents": 3}
    run = train(family, rows, plugin, settings | {"gradient_checkpointing": True})
    torch.testing.assert_close(run.series("loss"), losses, rtol=1e-4, atol=0)
    torch.testing.assert_close(run.series("grad_norm"), norms, rtol=1e-3, atol=0)
    torch.testing.assert_close(run.weights, weights, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_images_are_refused_over_a_layout_and_computed_without_one(family: str):
    model = patch_model(({"gemma3": tiny_gemma3} | FAMILIES)[family]()).eval()
    images: dict[str, Any] = {"pixel_values": torch.zeros(1, 3, 28, 28)}
    ids = torch.arange(9)[None]
    with pytest.raises(
        ValueError, match=r"pixel_values of shape \(1, 3, 28, 28\) came with a layout.*without a layout"
    ):
        model(input_ids=ids, layout=Layout({0: (Segment(0, 0, 9),)}), **images)
    if family == "gemma3":  # four rows of whose text are an image's
        ids[0, 2:6] = IMAGE
        plain = tiny_gemma3().eval()
        logits, right = (
            either(input_ids=ids, token_type_ids=(ids == IMAGE).long(), **images).logits for either in (model, plain)
        )
        torch.testing.assert_close(logits, right)


def sharded_gemma3(output: str, rows: Any, settings: dict[str, Any]) -> Any:
    """Trains on this rank."""
    plugin = {"capacity": 40, "global_batch_documents": 3, "sharding": "zero3"}
    return train(tiny_gemma3(), rows, plugin, settings | {"output_dir": output}, in_order=True)


@pytest.mark.processes
def test_two_ranks_shard_a_model_with_a_tower_for_images(ranks2: RankPool, tmp_path: Path, monkeypatch):
    """Its class lists layers to shard that it does not have; its tower learns nothing from text."""
    monkeypatch.setitem(MODELS, "gemma3", tiny_gemma3)
    rows = [{"input_ids": [token % (IMAGE - 2) for token in row["input_ids"]]} for row in documents((60, *LENGTHS))]
    settings = {"num_train_epochs": 2, "gradient_checkpointing": True}
    batches = GlobalBatches(np.array([60, *LENGTHS]), 3, documents=3)
    losses, norms, _ = reference("gemma3", rows, batches, 2, {"output_dir": str(tmp_path), "num_train_epochs": 2})
    for run in ranks2.run(sharded_gemma3, str(tmp_path), rows, settings):
        assert sum(run.series("split_documents")) > 0
        assert run.series("loss") == pytest.approx(losses, rel=1e-4)
        assert run.series("grad_norm") == pytest.approx(norms, rel=1e-3)


def test_heads_are_the_language_models_and_memory_is_refused_by_name():
    model = tiny_llava()
    ((key, rule),) = problems(Request(stated({}), LongContextPlugin(capacity=8, ulysses_degree=3), model))
    assert (key, "must divide the 4 attention heads" in rule) == ("ulysses_degree", True)
    with pytest.raises(ValueError, match="model_type='llava' cannot be counted"):
        MemoryModel.from_config(model.config)


def test_our_name_is_the_language_models_alone():
    """A tower of images keeps the attention it was loaded with."""
    config = patch_model(tiny_llava()).config
    assert (config.text_config._attn_implementation, config.vision_config._attn_implementation) == ("longctx", "sdpa")
