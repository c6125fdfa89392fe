"""Keeping attention and offloading change where things are, never a bit of the loss or of any gradient.

Reference: the same model on the same layouts without checkpointing, offload or kept attention. On a CPU every kernel gives
the same bits when it runs again, so the comparison is exact.
"""

import copy
from typing import Any

import peft
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from hf_longctx import Layout, Segment, patch_model, zigzag
from hf_longctx.attention import engine
from hf_longctx.attention.kept import KeptAttention
from hf_longctx.training.memory.activations import KEPT_FROM_SHARE, ActivationMemory, attention_share
from tests.builders.tiny_models import FAMILIES, tiny_llama
from tests.builders.training.activation_steps import PACKED, check_equal, model_of, run_held, step
from tests.worlds.rank_pool import RankPool

SPLIT = {rank: (*shard, Segment(1 + rank, 0, 5)) for rank, shard in zigzag(0, 41, range(2)).items()}
SHARED = {
    "direct": Layout(SPLIT),
    "ulysses": Layout(SPLIT, ulysses=2),
    "ulysses, nothing whole": Layout(zigzag(0, 41, range(2)), ulysses=2),
}
HOLDING = [
    (False, "never", 0.0),
    (True, "never", 0.0),
    (True, "always", 0.0),
    (True, "always", 0.4),
    (False, "never", 0.7),
]
"""(checkpointing, keep_attention, offload); the first is the reference."""


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "bloom", "mpt"])
def test_one_process_keeps_every_bit(family: str, monkeypatch: pytest.MonkeyPatch):
    right = step(model_of(family), PACKED, None)
    calls: list[int] = []
    attend = engine.attend
    monkeypatch.setattr(engine, "attend", lambda *args: (calls.append(1), attend(*args))[1])
    for checkpointing, keep, offload in HOLDING:
        calls.clear()
        model = model_of(family, checkpointing)
        memory = ActivationMemory(model, keep_attention=keep, device="cpu")
        check_equal(step(model, PACKED, memory, offload), right)
        assert len(calls) == (8 if checkpointing and keep == "never" else 4), "attention of 4 layers, once or twice"
        assert memory.host.bytes_to_host == memory.host.bytes_to_device
        assert (memory.host.bytes_to_host > 0) == (offload > 0)


@pytest.mark.parametrize("keep", ["never", "always"])
def test_autocast_and_layers_fetched_ahead(keep: str):
    # As on CUDA, where a layer's rows come back while the layer after it runs backward.
    with torch.autocast("cpu", torch.bfloat16):
        right = step(model_of("llama"), PACKED, None)
    for checkpointing in (False, True):
        model = model_of("llama", checkpointing)
        memory = ActivationMemory(model, keep_attention=keep, device="cpu")
        memory.host.ahead = 1
        with torch.autocast("cpu", torch.bfloat16):
            check_equal(step(model, PACKED, memory, 0.6), right)


def test_layers_that_call_attention_twice():
    """Each call is kept for itself: the second one was given what the first had computed, in forward already."""

    def diffllama(checkpointing: bool) -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
        model = DiffLlamaForCausalLM(DiffLlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return patch_model(model, loss_chunk_tokens=16)

    right = step(diffllama(False), PACKED, None)
    for checkpointing, keep, offload in HOLDING:
        model = diffllama(checkpointing)
        check_equal(step(model, PACKED, ActivationMemory(model, keep_attention=keep, device="cpu"), offload), right)


def test_adapters_on_frozen_layers():
    """Gradients go through inputs; nothing of the frozen weights moves."""

    def adapted(checkpointing: bool) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(tiny_llama(num_hidden_layers=4), config)
        patch_model(model, loss_chunk_tokens=16).train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    right = step(adapted(False), PACKED, None)
    assert all("lora" in name for name in right if name != "loss")
    for checkpointing, keep, offload in HOLDING:
        model = adapted(checkpointing)
        check_equal(step(model, PACKED, ActivationMemory(model, keep_attention=keep, device="cpu"), offload), right)


def test_nothing_is_left_behind():
    model = model_of("llama", checkpointing=True)
    before = [dict(layer.__dict__) for layer in model.model.layers]
    memory = ActivationMemory(model, keep_attention="always", device="cpu")
    with pytest.raises(ValueError, match="input_ids has shape"), memory.micro_batch(PACKED, 0, 0.5):
        model(input_ids=torch.arange(5)[None], layout=PACKED)
    assert [dict(layer.__dict__) for layer in model.model.layers] == before
    copy.deepcopy(model)
    with torch.no_grad(), memory.micro_batch(PACKED, 0, 0.5):
        model(input_ids=torch.arange(40)[None], layout=PACKED)
        model.eval()(input_ids=torch.arange(40)[None], layout=PACKED)
    assert memory.host.bytes_to_host == 0


def test_kept_attention_is_used_once_and_then_free():
    kept = KeptAttention()
    calls: list[int] = []

    def compute() -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return (torch.full((3,), float(len(calls))),)

    layer = kept.in_layer(lambda: [float(kept.once(compute)[0][0]) for _ in range(2)])
    assert [layer() for _ in range(4)] == [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "two calls in a layer"
    assert not kept._kept


def test_backward_twice_through_one_graph():
    model = model_of("llama", checkpointing=True)
    memory = ActivationMemory(model, keep_attention="always", device="cpu")
    with memory.micro_batch(PACKED, 0, 0.5):
        loss = model(input_ids=torch.arange(40)[None], layout=PACKED).logits.square().mean()
        loss.backward(retain_graph=True)
        once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=1e-6, atol=1e-7)


# Two ranks


@pytest.mark.parametrize("layout", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_ranks_that_share_documents_keep_every_bit(ranks2: RankPool, family: str, layout: Layout):
    right = ranks2.run(run_held, family, layout, *HOLDING[0], False)
    for checkpointing, keep, offload in HOLDING[1:]:
        answers = ranks2.run(run_held, family, layout, checkpointing, keep, offload, False)
        for (answer, sent), (expected, sent_once) in zip(answers, right):
            check_equal(answer, expected)
            if checkpointing and keep == "never":
                assert sent > sent_once, "recomputing attention exchanges again"
            else:
                assert sent == sent_once


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_layers_sharded_with_fsdp2(ranks2: RankPool, family: str):
    """Gradients are reduced in another order: 1e-6 of a parameter's largest."""
    right = ranks2.run(run_held, family, SHARED["direct"], *HOLDING[0], False)
    for checkpointing, keep, offload in HOLDING:
        for (answer, _), (expected, _) in zip(
            ranks2.run(run_held, family, SHARED["direct"], checkpointing, keep, offload, True), right
        ):
            for name, value in expected.items():
                torch.testing.assert_close(answer[name], value, rtol=0, atol=1e-6 * float(value.abs().max()))


# What is decided


def test_auto_keeps_attention_where_it_is_much_of_a_layer():
    """Shares counted by hand: 4 FLOPs per element of the heads and pair, 2 per weight and token."""
    model = model_of("llama")
    memory = ActivationMemory(model, device="cpu")
    weights = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64  # q and o, k and v, MLP, norms
    for length in (10, 100_000):
        attention, linear = 4 * 64 * length * (length + 1) / 2, 2 * weights * length
        share = attention_share(model.config, Layout({0: (Segment(0, 0, length),)}))
        assert share == pytest.approx(attention / (attention + linear), rel=1e-9)
        assert memory.keeps_attention(Layout({0: (Segment(0, 0, length),)})) == (share >= KEPT_FROM_SHARE)
    assert not memory.keeps_attention(Layout({0: [Segment(doc, 0, 10) for doc in range(10_000)]})), "all short"
    assert memory.keeps_attention(Layout({0: [Segment(0, 0, 100_000), Segment(1, 0, 10)]}))


def test_a_window_and_idle_experts_do_not_count():
    layout = Layout({0: (Segment(0, 0, 100),)})
    mistral, mixtral = FAMILIES["mistral"](torch.float32).config, FAMILIES["mixtral"](torch.float32).config
    pairs = 7 * 8 // 2 + 93 * 7
    weights = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert attention_share(mistral, layout) == pytest.approx(4 * 64 * pairs / (4 * 64 * pairs + 200 * weights))
    weights += 3 * 64 * 96 + 4 * 64  # two experts of four, and the router
    assert attention_share(mixtral, layout) == pytest.approx(4 * 64 * 5050 / (4 * 64 * 5050 + 200 * weights))


def test_what_cannot_be_done_is_refused():
    model = model_of("llama")
    with pytest.raises(ValueError, match="keep_attention='sometimes' is unknown; valid: auto, always, never"):
        ActivationMemory(model, keep_attention="sometimes", device="cpu")
    with pytest.raises(ValueError, match=r"cannot run over a layout: call hf_longctx.patch_model\(model\) first"):
        ActivationMemory(tiny_llama(), device="cpu")
    wrapped = model_of("llama")
    wrapped.model.layers[0] = checkpoint_wrapper(wrapped.model.layers[0])  # as accelerate does
    with pytest.raises(ValueError, match=r"activation_checkpointing wraps layers.* Valid: gradient_checkpointing=True"):
        ActivationMemory(wrapped, device="cpu")
    memory = ActivationMemory(model, device="cpu")
    with pytest.raises(ValueError, match=r"offload=1\.5 must be a share"), memory.micro_batch(PACKED, 0, 1.5):
        pass
    for kwargs in ({"use_reentrant": True}, {"preserve_rng_state": False}):  # torch takes True where it is not given
        model.gradient_checkpointing_enable(kwargs)
        with pytest.raises(ValueError, match=r"use_reentrant=True: .* Valid: "), memory.micro_batch(PACKED, 0):
            pass
