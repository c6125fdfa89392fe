"""A micro-batch on fake tensors, beside what real ranks send, and counting on from few layers."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_longctx import Exchange, Layout, patch_model, zigzag
from hf_longctx.attention.engine import layout_attention
from hf_longctx.training.traced import (
    Choice,
    RecordingExchange,
    Trace,
    Traceable,
    counted_on,
    fake_world,
    kernel_on_any_device,
)
from tests.worlds.rank_pool import RankPool

TOKENS = 100


def tiny(layers: int, kernel: str = "auto") -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=64))
    return patch_model(model, kernel=kernel)


def bytes_sent(layers: int) -> int:
    """Train on one document over all ranks; return what this rank has sent."""
    exchange = Exchange()
    before, ranks = exchange.bytes_sent, exchange.world_size
    layout = Layout(zigzag(0, TOKENS, range(ranks)))
    ids = torch.zeros((1, layout.tokens(exchange.rank)), dtype=torch.int64)
    rows = {"input_ids": ids, "shift_labels": ids, "num_items_in_batch": TOKENS}
    tiny(layers)(**rows, layout=layout, exchange=exchange).loss.backward()
    return exchange.bytes_sent - before


def traced(rank: int, ranks: int, layers: int) -> Trace:
    layout = Layout(zigzag(0, TOKENS, range(ranks)))
    with kernel_on_any_device() as kernel:
        return Traceable(lambda count: tiny(count, kernel), layout, rank, ranks, ranks, "ddp").trace(layers)


def test_traced_messages_are_those_that_real_ranks_send(ranks2: RankPool):
    for rank, sent in enumerate(ranks2.run(bytes_sent, 2)):
        assert traced(rank, 2, 2).sent == {1 - rank: sent}


def test_tensors_of_more_layers_are_counted_on():
    few, more, check = (traced(1, 4, layers) for layers in (3, 4, 5))
    counted = counted_on(few, [(more, 2)])
    assert counted.peak == pytest.approx(check.peak, rel=0.01)
    assert (counted.sent, counted.messages) == (check.sent, check.messages)
    assert more.peak > few.peak


def test_a_family_whose_masks_carry_the_layout_is_traced():
    """Masks are asked about positions, which fake tensors have no answer to."""

    def model_of(layers: int) -> Any:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        return patch_model(
            Qwen3ForCausalLM(Qwen3Config(**sizes, num_hidden_layers=layers, vocab_size=64)), kernel=kernel
        )

    layout = Layout(zigzag(0, TOKENS, range(4)))
    with kernel_on_any_device() as kernel:
        few, more = (Traceable(model_of, layout, 1, 4, 4, "zero3").trace(layers) for layers in (1, 2))
    assert {peer: 2 * count for peer, count in few.sent.items()} == more.sent
    assert set(few.sent) == {0, 2, 3}


@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
def test_a_model_that_is_frozen_in_part_is_traced(sharding: str):
    def model_of(trained: bool) -> Any:
        model = tiny(1, kernel)
        model.model.requires_grad_(trained)
        model.model.norm.requires_grad_(True)
        return model

    layout = Layout(zigzag(0, TOKENS, range(4)))
    with kernel_on_any_device() as kernel:
        whole, frozen = (Traceable(model_of, layout, 1, 4, 4, sharding).trace(trained) for trained in (True, False))
    assert frozen.kinds["grad"] < whole.kinds["grad"]
    assert frozen.peak < whole.peak
    assert frozen.kinds["param"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_attention_returns_is_not_copied_for_the_projection_after_it(ranks: int):
    """Rotations of a part of a head (GLM) give q head by head, and torch's kernel for CUDA its output then too."""
    layout = Layout(zigzag(0, TOKENS, range(ranks)))
    tokens = layout.tokens(0)
    with kernel_on_any_device() as kernel, fake_world(ranks, 0), FakeTensorMode():
        q, k, v = (torch.empty(heads, tokens, 64, dtype=torch.bfloat16).transpose(0, 1) for heads in (4, 2, 2))
        exchange = RecordingExchange() if ranks > 1 else None
        assert layout_attention(q, k, v, layout, exchange, kernel=kernel).is_contiguous()


def test_each_kind_of_layer_is_counted_on_by_itself():
    few = Trace(1000, {"param": 600}, {3: 40}, 8, 1.0)
    of_one = Trace(1300, {"param": 800, "act": 5}, {3: 60}, 12, 1.0)
    of_other = Trace(1100, {"param": 610}, {3: 40, 2: 7}, 9, 1.0)
    assert counted_on(few, [(of_one, 2), (of_other, 3)]) == Trace(1900, {"param": 1030}, {3: 80, 2: 21}, 19, 3.0)


def test_two_layers_of_each_kind_are_run():
    assert Choice.of("aaaaaa") == Choice((0, 1, 2), (((0, 1, 2, 3), 3),), (0, 1, 2, 3, 4))
    repeating = Choice.of("sssssf" * 4)
    assert repeating.few == (0, 1, 5, 11)
    assert repeating.more == (((0, 1, 2, 5, 11), 18), ((0, 1, 5, 11, 17), 2))
    assert repeating.check == (0, 1, 2, 5, 11, 17)
    dense_first = Choice.of("d" + "m" * 9)  # there is no more of the first kind
    assert (dense_first.few, dense_first.more, dense_first.check) == ((0, 1, 2), (((0, 1, 2, 3), 7),), (0, 1, 2, 3, 4))
    for kinds in ("aaaa", "aabb", "aabbb", "abcdefg" * 3):
        with pytest.raises(ValueError, match="layers of"):
            Choice.of(kinds)
