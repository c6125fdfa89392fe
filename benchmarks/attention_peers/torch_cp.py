"""torch's context_parallel: its ring templates, given the CPU flash operation. (The public function knows CUDA's only.)"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attention_cases import Case
from torch.distributed.tensor.experimental._context_parallel import _attention

from attention_peers import Prepare, Prepared, World, need, need_one_document

templates: Any = _attention
"""Not public, and typed for CUDA."""

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def ring(case: Case, world: World, rotate: str) -> Prepared:
    """`rotate`: how keys and values travel, "alltoall" (a ring) or "allgather"."""
    need(not case.alibi, "its templates pass no bias on to their operation")
    need_one_document(case, 2 * world.size)
    balancer = templates._create_default_load_balancer(case.tokens, world.size, "cpu")
    rows = balancer._generate_indices()[0].long().chunk(world.size)[world.rank]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        templates.set_rotate_method(rotate)
        return _RingAttention.apply(q, k, v)

    return Prepared(lambda x: x[rows].transpose(0, 1)[None].contiguous(), attend)


class _RingAttention(torch.autograd.Function):
    """q, k, v [1, H, T, D] -> out [1, H, T, D]."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = templates._templated_ring_attention(dist.group.WORLD, 2, _forward, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        return templates._templated_ring_attention_backward(
            dist.group.WORLD, 2, _backward, grad_out.contiguous(), "grad_out", q, k, v, out, lse.contiguous(), True
        )[:3]


def _forward(query: Any, key: Any, value: Any, is_causal: bool = False, **_: Any) -> Any:
    return _forward_op(query, key, value, 0.0, bool(is_causal))


def _backward(*, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, grad_out: Any) -> Any:
    return _backward_op(grad_out, query, key, value, out, logsumexp, 0.0, bool(is_causal))


IMPLEMENTATIONS: dict[str, Prepare] = {
    "torch context_parallel ring": partial(ring, rotate="alltoall"),
    "torch context_parallel all-gather": partial(ring, rotate="allgather"),
}
