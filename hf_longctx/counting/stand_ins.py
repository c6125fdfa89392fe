"""Attention, masks and experts that transformers' modeling code calls while a model is counted: they record shapes.

Modeling code asks for them by name, as it asks for "sdpa" or "flash_attention_2". Attention keeps for backward what this
package's attention keeps (attention/engine.py): queries, keys, values, output and log-sum-exp. A mask is one boolean without
memory; which window or chunk it means is found by asking its mask function about a few pairs. Experts compute what every token
costs in the experts that it goes to, with the first expert's weights: which expert it is does not change a shape.

Shapes: B = 1 document, H heads, T tokens, D head dimension, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import CellType, FunctionType
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_longctx.counting.records import AttentionShape

NAME = "hf_longctx_counting"
FARTHEST = 2**20
"""Tokens up to which masks are asked: a window that is wider counts as none."""


class Listener(Protocol):
    """Receives what the stand-ins are called with."""

    def attended(self, shape: AttentionShape, own: tuple[torch.Tensor, ...]) -> None:
        """Note a call of attention, and `own`, the output and log-sum-exp that it keeps itself."""

    def routed(self, module: torch.nn.Module, experts: int, per_token: int) -> None:
        """Note that a module sends each token to `per_token` of its experts."""

    def not_exact(self, note: str) -> None:
        """Note something that could not be counted exactly."""


LISTENER: ContextVar[Listener] = ContextVar("listener")
REACHES: ContextVar[dict[int, tuple[int | None, int | None]]] = ContextVar("reaches")
"""Storage of a mask -> its window and its chunk. Views of a mask share its storage."""


class AttentionReached(Exception):
    """Backward has come to attention, where counting ends it (busiest.py)."""


class _Attend(torch.autograd.Function):
    """Keeps for backward what attention over a layout keeps."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        batch, heads, tokens, _ = q.shape
        out = q.new_empty(batch, tokens, heads, v.shape[-1])
        lse = q.new_empty((batch, heads, tokens), dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AttentionReached


def attend(
    module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **keywords: Any
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface: q [B, H, T, D], k and v [B, Hkv, T, D or Dv] -> [B, T, H, Dv]."""
    if torch.is_autocast_enabled("cpu"):  # as the engine: kernels compute in half precision
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    out, lse = _Attend.apply(query, key, value)
    window, chunk = (None, None)
    if isinstance(attention_mask, torch.Tensor):
        window, chunk = REACHES.get().get(attention_mask.untyped_storage()._cdata, (None, None))
    sliding_window = keywords.get("sliding_window")
    if isinstance(sliding_window, int) and sliding_window > 0:
        window = sliding_window if window is None else min(sliding_window, window)
    shape = AttentionShape(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], window, chunk)
    LISTENER.get().attended(shape, (out, lse))
    return out, None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    device: Any = "cpu",
    **keywords: Any,
) -> torch.Tensor:
    """Mask of transformers' interface: bool [B, 1, T, T] of one element, whose storage stands for its window and chunk."""
    made = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    if mask_function is not None:
        try:
            reach = _reach(mask_function)
        except Exception as error:  # of any function that needs more than positions
            reach = (None, None)
            LISTENER.get().not_exact(
                f"a mask depends on more than positions ({type(error).__name__}): counted as if queries saw all before them"
            )
        REACHES.get()[made.untyped_storage()._cdata] = reach
    return made.expand(batch_size, 1, q_length, kv_length)


def _reach(mask_function: Callable[..., Any]) -> tuple[int | None, int | None]:
    """(window, chunk) that a mask function means. Queries q that see key 0 are those below the window, or of its chunk; after
    the last of them, key 1 is seen in a window, and not in chunks."""
    with _disable_current_modes(), unset_fake_temporarily():
        mask_function = _on_values(mask_function)
        zero = torch.zeros((), dtype=torch.long)

        def sees(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(mask_function(zero, zero, q, kv)).expand(q.shape)

        queries = torch.arange(FARTHEST)
        reach = int(sees(queries, torch.zeros_like(queries)).sum())
        if reach == FARTHEST:
            return None, None
        in_window = reach > 1 and bool(sees(torch.tensor([reach]), torch.tensor([1])).all())
        return (reach, None) if in_window or reach == 1 else (None, reach)


def _on_values(value: Any) -> Any:
    """A mask function that holds real tensors where it held fake ones of one element: the padding before a document, none."""
    if isinstance(value, FakeTensor):
        if value.numel() != 1:
            raise ValueError(f"a mask of values of shape {list(value.shape)}")
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, tuple):
        return tuple(map(_on_values, value))
    if isinstance(value, FunctionType) and value.__closure__:
        cells = tuple(CellType(_on_values(cell.cell_contents)) for cell in value.__closure__)
        return FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    return value


def experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts of transformers' interface: [T, hidden] -> [T, hidden], with index and weights [T, K]."""
    tokens, per_token = top_k_index.shape
    up = self.gate_up_proj if self.has_gate else self.up_proj
    up_bias, down_bias = None, None
    if self.has_bias:
        up_bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        down_bias = self.down_proj_bias
    LISTENER.get().routed(self, up.shape[0], per_token)

    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made = rows @ weight[0] if self.is_transposed else torch.nn.functional.linear(rows, weight[0])
        return made if bias is None else made + bias[0]

    with torch.autocast("cpu", enabled=False):  # grouped products compute in the dtype of the weights
        order = torch.sort(top_k_index.reshape(-1))[1]
        inner = product(hidden_states[order // per_token], up, up_bias)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        made = product(inner, self.down_proj, down_bias)
        if getattr(self, "has_post_expert_norm", False):  # transformers has it from 5.20 on
            made = self.post_expert_norm(made)
        made = (made * top_k_weights.reshape(-1)[order].unsqueeze(-1))[torch.empty_like(order)]
        return made.view(tokens, per_token, -1).sum(1).to(hidden_states.dtype)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
