"""Losses of models whose weights are in half precision: of logits that a class makes itself, of hidden states that are wider."""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MambaConfig, MambaForCausalLM

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.models.loss.cross_entropy import chunked_cross_entropy
from hf_longctx.models.loss.own_logits import own_cross_entropy


def test_hidden_states_may_sum_beyond_float16() -> None:
    """2,000 x 64 ones are more than 65,504."""
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        pad_token_id=0,
    )
    model = Gemma2ForCausalLM(config).half()
    patch_model(model)
    hidden = torch.ones(2000, 64, dtype=torch.float16, requires_grad=True)
    loss = own_cross_entropy(model, hidden, torch.full((2000,), -100), 64)
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_gradients_of_a_head_may_sum_beyond_float16() -> None:
    """Thousands of rows with one label do, before what scales the loss is divided out: no scaler could help."""
    rows = 4096
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weight, hidden = torch.randn(16, 8) * 0.02, 20 + torch.rand(rows, 8)
    labels = torch.full((rows,), 3)
    halves = [x.half().requires_grad_() for x in (hidden, weight)]
    whole = [x.detach().float().requires_grad_() for x in halves]
    (chunked_cross_entropy(*halves, labels, chunk_tokens=rows) / rows).backward()
    torch.nn.functional.cross_entropy(whole[0] @ whole[1].t(), labels).backward()
    for half, right in zip(halves, whole):
        assert half.grad is not None
        torch.testing.assert_close(half.grad.float(), right.grad, rtol=2e-3, atol=1e-5)


def test_a_head_behind_which_logits_change_is_learned_as_well_in_many_chunks_as_in_one() -> None:
    """Gemma 2 caps its logits. In bfloat16, 64 summands one after the other lose several times what one sum does."""
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(config).bfloat16()
        rows, labels = torch.randn(1024, 32), torch.randint(64, (1024,))
    patch_model(model)
    errors, gradients = [], {}
    for dtype, chunk in ((torch.float32, 1024), (torch.bfloat16, 1024), (torch.bfloat16, 16)):
        model.to(dtype).zero_grad()
        own_cross_entropy(model, rows.to(dtype), labels, chunk).backward()
        gradients[dtype, chunk] = model.lm_head.weight.grad.float()
        model.bfloat16()
    right = gradients[torch.float32, 1024]
    for chunk in (1024, 16):
        errors.append(float((gradients[torch.bfloat16, chunk] - right).norm() / right.norm()))
    assert errors[1] < 1.5 * errors[0] < 0.01


def test_hidden_states_may_be_wider_than_the_head() -> None:
    """A Mamba adds up its layers in float32, whatever its weights are in."""
    config = MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, state_size=4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MambaForCausalLM(config).to(torch.bfloat16).train()
    ids = torch.arange(20)[None] % 31
    with torch.no_grad():
        right = model(input_ids=ids, labels=ids)
    layout = Layout({0: (Segment(0, 0, 20),)})
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    patch_model(model)
    loss = model(input_ids=ids, layout=layout, shift_labels=labels, num_items_in_batch=19).loss
    loss.backward()
    torch.testing.assert_close(loss, right.loss.float(), rtol=1e-2, atol=0)
    assert model.get_output_embeddings().weight.grad.any()
    logits = model(input_ids=ids, layout=layout).logits
    torch.testing.assert_close(logits, right.logits.to(logits.dtype), rtol=1e-2, atol=1e-2)
