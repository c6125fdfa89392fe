"""Text of a multimodal model with a supported language model inside: LLaVA around Llama."""

from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_longctx import Layout, Segment, patch_model
from tests.tiny_models import TINY

LENGTHS = (29, 8, 17)


def tiny_llava() -> Any:
    vision = CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=28, patch_size=14
    )
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**TINY, initializer_range=0.3), image_token_index=127
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlavaForConditionalGeneration(config).to(torch.float64)


def test_packed_text_of_a_llava_trains_as_its_documents_alone():
    """float64, loss and the language model's gradients: 1e-9 relative."""
    model, plain = patch_model(tiny_llava()), tiny_llava()
    documents = [(torch.arange(length) * 37 + 11 * doc) % 120 for doc, length in enumerate(LENGTHS)]
    shifted = [torch.cat([ids[1:], torch.tensor([-100])]) for ids in documents]
    count = sum(LENGTHS) - len(LENGTHS)
    right = torch.zeros((), dtype=torch.float64)
    for ids, labels in zip(documents, shifted):
        logits = plain(input_ids=ids[None]).logits[0]
        right = right + torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / count
    right.backward()
    packed = Layout({0: tuple(Segment(doc, 0, length) for doc, length in enumerate(LENGTHS))})
    loss = model(
        input_ids=torch.cat(documents)[None],
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


def test_our_name_is_the_language_models_alone():
    """A tower of images keeps the attention it was loaded with."""
    config = patch_model(tiny_llava()).config
    assert (config.text_config._attn_implementation, config.vision_config._attn_implementation) == ("longctx", "sdpa")
