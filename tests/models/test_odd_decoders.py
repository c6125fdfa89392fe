"""Decoders unlike most: code that looks at values, layers inside layers, layers that differ, and layers that are skipped."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    DbrxConfig,
    FalconConfig,
    Gemma3Config,
    MambaConfig,
)

from hf_longctx import LongContextPlugin
from hf_longctx.counting.config_fields import field_values, head_counts
from hf_longctx.hardware.devices import CLUSTERS
from hf_longctx.parallel.sharding import apart_but_shared
from hf_longctx.planner import GlobalBatches
from hf_longctx.precision import product_shape
from hf_longctx.simulator.machine import Machine
from hf_longctx.training import refusals
from hf_longctx.training.request import Request
from tests.builders.tiny_models import TINY
from tests.builders.training_runs import Run, documents, reference, train
from tests.worlds.rank_pool import RankPool

SIZES: dict[str, dict[str, Any]] = {
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"], "is_decoder": True},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "num_mem_blocks": 1,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
    },
    "roberta": {"is_decoder": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
}
"""Family -> fields of its configuration beside TINY."""
LENGTHS = [17, 40, 3, 60]


def odd_decoder(family: str) -> Any:
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"), 0.0)
    config = AutoConfig.for_model(family, **(TINY | dropout | {"max_position_embeddings": 128} | SIZES[family]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def odd_documents() -> Any:
    """X-MOD and RoBERTa number tokens by where padding is, which documents here have none of."""
    return [{"input_ids": [max(token, 2) for token in row["input_ids"]]} for row in documents(LENGTHS)]


def trained(family: str, *settings: Any) -> Run:
    return train(odd_decoder(family), odd_documents(), *settings)


@pytest.mark.parametrize("family", ["xmod", "zamba2"])
def test_decoders_whose_code_is_unlike_others_train_as_a_loop_over_documents(family: str, tmp_path: Path):
    """X-MOD looks at values, so that its costs are guessed; a layer of Zamba 2 holds another one that is checkpointed by itself.
    float32: losses and norms 1e-4 relative."""
    settings = {"output_dir": str(tmp_path), "max_steps": 2, "learning_rate": 1e-3}
    batches = GlobalBatches(np.array(LENGTHS), 3, documents=4)
    losses, norms, _ = reference(odd_decoder(family), odd_documents(), batches, 2, settings)
    run = trained(family, {"capacity": 64, "global_batch_documents": 4}, settings)
    assert run.series("loss") == pytest.approx(losses, rel=1e-4)
    assert run.series("grad_norm") == pytest.approx(norms, rel=1e-3)


@pytest.mark.processes
@pytest.mark.parametrize("family", ["zamba2", "roberta"])
def test_weights_that_stand_in_several_parts_are_sharded_once(ranks2: RankPool, family: str, tmp_path: Path):
    """Zamba 2's layers share a block; RoBERTa's embeddings, which are a part of their own, are its head's weight, and its head's
    bias stands in two modules. float32, as above."""
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "max_steps": 1}
    batches = GlobalBatches(np.array(LENGTHS), 3, documents=4)
    losses, norms, _ = reference(odd_decoder(family), odd_documents(), batches, 1, settings)
    plugin = {"capacity": 64, "global_batch_documents": 4, "sharding": "zero3"}
    for run in ranks2.run(trained, family, plugin, settings | {"gradient_checkpointing": True}):
        assert run.series("loss") == pytest.approx(losses, rel=1e-4)
        assert run.series("grad_norm") == pytest.approx(norms, rel=1e-3)


def test_parts_that_share_a_weight_with_others_are_left_to_what_is_around_them():
    model = torch.nn.ModuleDict({name: torch.nn.Sequential(torch.nn.Linear(2, 2)) for name in "abcd"})
    model["b"][0].weight = model["a"][0].weight
    sharded: list[Any] = []
    shard = apart_but_shared([model], lambda part: sharded.append(part) or part)
    together = [model["a"], model["b"]]
    for part in (*model.values(), together, [model["a"], model["c"]], model):
        assert shard(part) is part
    assert sharded == [model["c"], model["d"], together, model]


def test_fields_that_differ_from_layer_to_layer_are_read_of_all():
    differs = SimpleNamespace(intermediate_size=[96, 64], hidden_size=32)
    assert product_shape(differs)[1:] == (32, 96)
    assert field_values(differs, "missing") == []

    class OfLayers:
        per_layer_config = (SimpleNamespace(heads=4), SimpleNamespace(heads=6))

        @property
        def heads(self) -> int:
            raise RuntimeError("ambiguous")

        def get_text_config(self) -> Any:
            return self

    assert field_values(OfLayers(), "heads") == [4, 6]
    assert refusals._size(SimpleNamespace(config=OfLayers()), "heads") == 2


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (SimpleNamespace(num_attention_heads=8), [(8, 8)]),
        (SimpleNamespace(num_attention_heads=8, num_key_value_heads=None), [(8, 8)]),
        (SimpleNamespace(num_attention_heads=8, num_key_value_heads=[4, 2]), [(8, 4), (8, 2)]),
        (SimpleNamespace(n_head=8, multi_query=True), [(8, 1)]),
        (FalconConfig(num_attention_heads=8), [(8, 1)]),
        (FalconConfig(num_attention_heads=8, num_kv_heads=2, new_decoder_architecture=True), [(8, 2)]),
        (DbrxConfig(n_heads=8, attn_config={"kv_n_heads": 2}), [(8, 2)]),
        (BartConfig(encoder_attention_heads=2, decoder_attention_heads=4), [(4, 4)]),
        (Gemma3Config(text_config={"num_attention_heads": 8, "num_key_value_heads": 2}), [(8, 2)]),
        (MambaConfig(), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_heads_are_found_whatever_they_are_called(config: Any, heads: list[tuple[int, int]]):
    assert head_counts(config) == heads


def test_layers_that_differ_in_heads_are_counted_and_divided():
    """dots3's full attention has fewer heads than its other layers."""
    of_dots3 = pytest.importorskip(
        "transformers.models.dots3_note.configuration_dots3_note", reason="this transformers has no dots3"
    )
    config = of_dots3.Dots3NoteTextConfig()
    assert {type(pair) for pair in head_counts(config)} == {tuple}
    assert len(set(head_counts(config))) > 1
    common = math.gcd(*(kv_heads for _, kv_heads in head_counts(config)))
    with pytest.raises(ValueError, match=f"must divide 8 devices of a node and {common} key/value heads"):
        Machine.of(CLUSTERS["h100"], config, tensor_parallel=3)


@pytest.mark.parametrize(("sharding", "processes"), [("zero3", 2), ("ddp", 2), ("zero3", 1)])
def test_layers_that_are_skipped_at_random_are_refused_where_ranks_share_weights(sharding: str, processes: int):
    """BART runs documents alone; other models are refused whatever the sharding is."""
    model = SimpleNamespace(config=BartConfig(decoder_layerdrop=0.5))
    plugin = LongContextPlugin(capacity=8, sharding=sharding)
    refused = list(refusals._layers_drawn(Request(None, plugin, model, processes), plugin))
    if sharding == "zero3" and processes > 1:
        [(key, rule)] = refused
        assert key == "sharding"
        assert "layerdrop=0.5: each rank would draw the layers that it skips" in rule
    else:
        assert not refused
