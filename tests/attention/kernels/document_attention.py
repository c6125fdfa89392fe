"""Rows of a document for a kernel, and plain attention over whole documents."""

import torch

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def tensors(tokens: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output: [T, heads, D]."""
    generator = torch.Generator().manual_seed(tokens)
    drawn = [torch.randn(tokens, h, HEAD_DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [x.to(dtype).to(device) for x in drawn]


def plain(tensors: list[torch.Tensor], lengths: list[int]) -> list[torch.Tensor]:
    """Output and gradients of q, k, v in float64: each document alone, torch's attention written out."""
    q, k, v, grad = (x.detach().double().cpu() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = []
    for dq, dk, dv in zip(*(x.split(lengths) for x in leaves)):
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (dk, dv))
        scores = dq.transpose(0, 1) @ keys.transpose(1, 2) * HEAD_DIM**-0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
