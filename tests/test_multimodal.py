"""Text of a multimodal model with a supported language model inside: LLaVA and SmolVLM around Llama, Mistral 3 around Mistral."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from hf_longctx import Layout, LongContextPlugin, Segment, patch_model
from hf_longctx.planner import GlobalBatches
from hf_longctx.planner.memory import MemoryModel
from hf_longctx.training.refusals import problems
from hf_longctx.training.request import Request, stated
from tests.tiny_models import TINY
from tests.training_runs import MODELS, documents, reference, train

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
