"""Stretched rotary positions: a document over two ranks equals plain transformers with the same rope_parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, MixtralConfig

from hf_longctx.attention.exchange import Exchange
from hf_longctx.certified_patch import patch_model
from hf_longctx.layouts.layout import Layout, zigzag
from hf_longctx.models.rope_scaling import scale_rope
from tests.builders.tiny_models import TINY, tiny_llama
from tests.worlds.rank_pool import RankPool, worker_state

PRETRAINED, TOKENS = 64, 150
"""Context before scaling, and a document that is longer."""
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 16.0},
    "llama3": {"factor": 4.0},
}
IDS = torch.arange(TOKENS) * 7 % TINY["vocab_size"]


def scaled(rope_type: str, **parameters: Any) -> LlamaConfig:
    config = LlamaConfig(**(TINY | {"max_position_embeddings": PRETRAINED}))
    scale_rope(config, rope_type=rope_type, **(SCALINGS[rope_type] | parameters))
    return config


def plain(rope_type: str) -> Any:
    """A tiny model in float64, its configuration written as a user of plain transformers would."""
    parameters: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, **SCALINGS[rope_type]}
    if rope_type != "linear":
        parameters["original_max_position_embeddings"] = PRETRAINED
    if rope_type == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return tiny_llama(torch.float64, max_position_embeddings=4 * PRETRAINED, rope_parameters=parameters)


def part_of_loss(folder: str) -> tuple[float, dict[str, torch.Tensor]]:
    """On each rank: loss and gradients of its half of the document, from a saved model."""
    if "exchange" not in worker_state:
        worker_state["exchange"] = Exchange()
    exchange = worker_state["exchange"]
    model = patch_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    layout = Layout(zigzag(0, TOKENS, (0, 1)))
    rows = torch.from_numpy(layout.positions(exchange.rank))
    following = torch.cat([IDS[1:], torch.tensor([-100])])
    loss = model(
        input_ids=IDS[rows][None],
        shift_labels=following[rows][None],
        num_items_in_batch=TOKENS - 1,
        layout=layout,
        exchange=exchange,
    ).loss
    loss.backward()
    return float(loss.detach()), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_a_document_over_two_ranks_equals_plain_transformers(ranks2: RankPool, tmp_path: Path, rope_type: str):
    model = AutoModelForCausalLM.from_config(scaled(rope_type), dtype=torch.float64)
    expected = plain(rope_type)
    assert model.config.rope_parameters == expected.config.rope_parameters
    model.load_state_dict(expected.state_dict())
    model.save_pretrained(tmp_path)

    loss = cross_entropy(expected(input_ids=IDS[None]).logits[0, :-1], IDS[1:])
    loss.backward()
    answers = ranks2.run(part_of_loss, str(tmp_path))
    assert sum(part for part, _ in answers) == pytest.approx(float(loss.detach()), rel=1e-9)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(sum(gradients[name] for _, gradients in answers), weight.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_scaling_changes_the_model_and_a_checkpoint_keeps_it(tmp_path: Path, rope_type: str):
    scaled_model = plain(rope_type)
    scaled_model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert reloaded.config.rope_parameters == scaled(rope_type).rope_parameters
    assert reloaded.config.max_position_embeddings == 4 * PRETRAINED == scaled(rope_type).max_position_embeddings
    with torch.no_grad():
        logits = reloaded(input_ids=IDS[None]).logits
        torch.testing.assert_close(logits, scaled_model(input_ids=IDS[None]).logits, rtol=0, atol=0)
        unscaled = tiny_llama(torch.float64, max_position_embeddings=PRETRAINED)
        assert not torch.allclose(logits, unscaled(input_ids=IDS[None]).logits, atol=1e-2)


def test_a_configuration_that_leaves_the_head_dimension_open_is_stretched_too():
    """Mixtral's published one does, and transformers' yarn multiplies the head dimension."""
    config = MixtralConfig(**(TINY | {"max_position_embeddings": PRETRAINED, "head_dim": None}))
    scale_rope(config, rope_type="yarn", factor=4)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        assert model(input_ids=IDS[None]).logits.isfinite().all()


def test_a_scaling_replaces_another_from_the_same_pretraining():
    config = scaled("llama3")
    config.rope_parameters["rope_theta"] = 5e5
    scale_rope(config, rope_type="yarn", factor=2, attention_factor=1)
    assert config.rope_parameters == {
        "rope_theta": 5e5,
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": PRETRAINED,
        "attention_factor": 1.0,
    }
    assert config.max_position_embeddings == 4 * PRETRAINED, "it never shrinks"
    with pytest.raises(
        ValueError, match=r"scaled already \(linear, factor 4.0\).* give original_max_position_embeddings"
    ):
        scale_rope(scaled("linear"), rope_type="yarn", factor=8.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2}, "largest position of the call.* valid: linear, llama3, yarn"),
        ({"rope_type": "longrope", "factor": 2}, "largest position of the call"),
        ({"rope_type": "yarm", "factor": 2}, "'yarm' is unknown"),
        ({"rope_type": "linear", "factor": 1.0}, "factor=1.0 must be more than 1"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan"),
        ({"rope_type": "llama3", "factor": 2, "beta_fast": 3}, "beta_fast means nothing to rope_type='llama3'; it has"),
        ({"rope_type": "llama3", "factor": 2, "high_freq_factor": 1}, "low_freq_factor=1 must be less than"),
        ({"rope_type": "yarn", "factor": 2, "beta_slow": 40}, "beta_slow=40 must be less than beta_fast=32"),
        ({"rope_type": "yarn", "factor": 2, "attention_factor": -1}, "attention_factor=-1 must be positive"),
    ],
)
def test_what_is_no_scaling_is_refused_and_changes_nothing(wrong: dict[str, Any], message: str):
    config = LlamaConfig(**TINY)
    before = config.to_dict()
    with pytest.raises(ValueError, match=message):
        scale_rope(config, **wrong)
    assert config.to_dict() == before


def test_models_without_one_kind_of_rotary_positions_are_refused():
    with pytest.raises(ValueError, match="bloom model has no rotary positions"):
        scale_rope(BloomConfig(), rope_type="linear", factor=2)
    config = LlamaConfig(**TINY)
    config.rope_parameters = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ValueError, match=r"several kinds .*full_attention, sliding_attention"):
        scale_rope(config, rope_type="linear", factor=2)
