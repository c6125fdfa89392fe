"""Attention sinks: one learned score a head that takes part in every softmax and has no value (gpt-oss; Xiao et al., arXiv
2309.17453).

A sink only makes the denominator larger, so a kernel needs to know nothing of it. It is applied to the attention over all
keys, once, after the last merge:

    lse' = logaddexp(lse, sink)        out' = out * exp(lse - lse') = out * sigmoid(lse - sink)

Backward. With out' and lse' a kernel recomputes the true probabilities exp(score - lse'), and its rowsum(grad_out * out')
is right too, because the sink's value is zero: gradients of q, k and v need no change. The sink's own gradient is that of
a score with value zero:

    d sink = - sum over query rows of exp(sink - lse') * rowsum(grad_out * out')

Nothing is sent between ranks here: each rank computes the gradient that its rows and its heads give, and these add up to
the whole. Shapes: T query rows, Hq query heads, Dv dimension of values.
"""

import torch

ROWS_AT_ONCE = 4096
"""Query rows whose products grad_out * out' are held at a time, in the accumulation dtype: 64 MiB for 32 heads of 128."""


def add_sinks_(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Adds a score sinks [Hq] without a value to every row of out [T, Hq, Dv] and lse [Hq, T], in place."""
    scores = sinks.unsqueeze(1)
    out.mul_(torch.sigmoid(lse - scores).t().unsqueeze(-1))
    torch.logaddexp(lse, scores, out=lse)


def sink_gradient(grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """grad_out and out [T, Hq, Dv], lse [Hq, T] with the sinks [Hq] in it -> the gradient of the sinks, [Hq] in the dtype
    of lse."""
    gradient = torch.zeros_like(sinks)
    for start in range(0, len(out), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        products = (grad_out[rows].to(lse.dtype) * out[rows]).sum(-1)
        gradient -= ((sinks.unsqueeze(1) - lse[:, rows]).exp() * products.t()).sum(1)
    return gradient
