"""Functions of attention kernels for GPUs as plain mathematics (plain_varlen.py). They have the signatures of flash-attn 2.8.3,
flash_attn_3 3.0.0 and flash-attn-4 4.0.0b36; torch's own two pairs of operations are called through torch's schemas.
"""

from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx.attention.kernels.flash_attn_packages import FlashAttn2, FlashAttn3, FlashAttn4
from tests.attention.kernels import plain_varlen


def fa2_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    """A causal call with slopes rounds its bias, so it is none that may be made: slopes need a window below max_seqlen_k."""
    assert alibi_slopes is None or (not causal and 0 <= window_size_left < max_seqlen_k)
    window = (window_size_left, 0 if causal else window_size_right)
    out, lse = plain_varlen.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, window, softmax_scale, alibi_slopes, softcap)
    return out, lse, torch.empty(0), torch.empty(2)


def fa2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert alibi_slopes is None or (not causal and 0 <= window_size_left < max_seqlen_k)
    window = (window_size_left, 0 if causal else window_size_right)
    rows = (dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k)
    found_of = plain_varlen.backward(*rows, window, softmax_scale, alibi_slopes, softcap)
    for given_, gradient in zip((dq, dk, dv), found_of):
        given_.copy_(gradient)


def fa3_forward(
    q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
    attention_chunk=0, softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None,
    sm_margin=0,
):  # fmt: skip
    window = (window_size_left, 0 if is_causal else window_size_right)
    out, lse = plain_varlen.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, window, softmax_scale, None, softcap)
    return out, lse, None, None


def fa3_backward(
    dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, is_causal=False, window_size_left=-1,
    window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    window = (window_size_left, 0 if is_causal else window_size_right)
    rows = (dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k)
    for given_, gradient in zip((dq, dk, dv), plain_varlen.backward(*rows, window, softmax_scale, None, softcap)):
        given_.copy_(gradient)


def fa4_window(causal, left, right) -> tuple[int, int]:
    """None is unlimited there; a causal call has 0 to its right."""
    return -1 if left is None else left, 0 if causal else -1 if right is None else right


def fa4_forward(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, *, num_splits=1, return_lse=False,
):  # fmt: skip
    assert return_lse
    window = fa4_window(causal, window_size_left, window_size_right)
    return (*plain_varlen.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, window, softmax_scale), None, None, None)


def fa4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    deterministic=False,
):  # fmt: skip
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    window = fa4_window(causal, window_size_left, window_size_right)
    return plain_varlen.backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, window, softmax_scale)


PACKAGES = {
    FlashAttn2: SimpleNamespace(_flash_attn_varlen_forward=fa2_forward, _flash_attn_varlen_backward=fa2_backward),
    FlashAttn3: SimpleNamespace(fwd=fa3_forward, bwd=fa3_backward),
    FlashAttn4: SimpleNamespace(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward),
}


class EfficientAttention(TorchDispatchMode):
    """torch's two operations as plain mathematics, called through torch's own schemas."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.name().startswith("aten::_efficient_attention"):
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        call = SimpleNamespace(**dict(zip(names, args)), **(kwargs or {}))
        assert call.query.shape[2] == call.key.shape[2] == call.value.shape[2], "heads are not shared"
        assert all(x.is_contiguous() for x in (call.query, call.key, call.value))
        q, k, v, cu_q, cu_k = call.query[0], call.key[0], call.value[0], call.cu_seqlens_q, call.cu_seqlens_k
        lengths = cu_q.diff().tolist()
        assert call.max_seqlen_q == max(lengths)
        assert call.max_seqlen_k == max(cu_k.diff().tolist())
        assert call.dropout_p == 0
        assert call.bias is None
        assert call.custom_mask_type == 0 or lengths == cu_k.diff().tolist(), "causal blocks are square"
        window = (-1, -1) if call.custom_mask_type == 0 else (-1, 0)
        if func.name() == "aten::_efficient_attention_forward":
            assert call.compute_log_sumexp
            out, lse = plain_varlen.forward(q, k, v, cu_q, cu_k, window, call.scale, value_dims=True)
            padded = lse.new_full((len(lengths), q.shape[1], (max(lengths) + 31) // 32 * 32), torch.inf)
            for row, of_sequence in zip(padded, lse.split(lengths, 1)):
                row[:, : of_sequence.shape[1]] = of_sequence
            return out[None], padded, torch.empty(()), torch.empty(()), max(lengths), 0
        assert call.logsumexp.shape == (len(lengths), q.shape[1], (max(lengths) + 31) // 32 * 32)
        assert all((row[:, n:] == torch.inf).all() for row, n in zip(call.logsumexp, lengths))
        lse = torch.cat([row[:, :n] for row, n in zip(call.logsumexp, lengths)], 1)
        rows = (call.grad_out_[0], q, k, v, call.out[0], lse, cu_q, cu_k)
        gradients = plain_varlen.backward(*rows, window, call.scale, value_dims=True)
        return *(x[None] for x in gradients), torch.empty(())


class TorchsFlashAttention(TorchDispatchMode):
    """torch's copy of flash-attention 2 as plain mathematics. It takes no slopes and no soft cap."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.name().startswith("aten::_flash_attention"):
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        call = SimpleNamespace(**dict(zip(names, args)), **(kwargs or {}))
        cu_q, cu_k = call.cum_seq_q, call.cum_seq_k
        assert (call.max_q, call.max_k) == (max(cu_q.diff().tolist()), max(cu_k.diff().tolist()))
        assert call.dropout_p == 0
        window = (call.window_size_left, 0 if call.is_causal else call.window_size_right)
        if func.name() == "aten::_flash_attention_forward":
            rows = (call.query, call.key, call.value, cu_q, cu_k)
            out, lse = plain_varlen.forward(*rows, window, call.scale)
            return out, lse, torch.empty(()), torch.empty(()), torch.empty(())
        rows = (call.grad_out, call.query, call.key, call.value, call.out, call.logsumexp, cu_q, cu_k)
        return plain_varlen.backward(*rows, window, call.scale)
