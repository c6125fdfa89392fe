"""The loss of logits that a class makes itself, in float16."""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from hf_longctx import patch_model
from hf_longctx.models.own_logits import own_cross_entropy


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
