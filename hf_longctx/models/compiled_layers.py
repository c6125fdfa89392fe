"""Decoder layers whose layout-free parts are compiled (torch.compile): all but attention itself.

    norm, q/k/v projections, rotation  |  attention over the layout  |  output projection, residual, norm, MLP
    ----------- one graph ------------    -------- as it is -------     ------------ another graph ------------

A layout in a compiled function would be guarded, and compiled anew for each micro-batch. Both graphs take any number of
tokens and serve all layers of a model. What chooses by data or runs its own backward stays outside: a Mixtral's routed
experts, an MLP in tiles; the second graph then ends at the norm.

The classes carry the names of transformers' own, by which FSDP finds the layers to wrap. Weights, names of parameters and
calls without a layout stay as they are. Nothing is sent between ranks here.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_longctx.layouts.layout import Layout

LEAST_TOKENS = 2
"""torch.compile makes a graph of its own for dimensions of one: a single token runs as it is."""


class CompiledLayer(torch.nn.Module):
    """Mixin for transformers' decoder layers with rotary attention of ours (rope.py)."""

    longctx_backend: str = "inductor"
    """The backend of torch.compile."""
    longctx_chooses_by_data: bool = False
    """Whether its MLP routes tokens by what they hold."""
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        layout: Layout | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states [1, T, hidden] of this rank's shard -> [1, T, hidden]."""
        if layout is None:
            return super().forward(  # type: ignore[misc]
                hidden_states,
                *args,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        assert position_embeddings is not None
        run: Callable[..., Any] = _compiled if hidden_states.shape[1] >= LEAST_TOKENS else lambda part, backend: part
        query, key, value = run(_into_attention, self.longctx_backend)(self, hidden_states, *position_embeddings)
        out = self.self_attn.attend(query, key, value, attention_mask, layout=layout, **kwargs)
        if self.longctx_chooses_by_data or "forward" in self.mlp.__dict__:
            residual, normed = run(_out_of_attention, self.longctx_backend)(self, hidden_states, out)
            return residual + self.mlp(normed)
        return run(_to_the_end, self.longctx_backend)(self, hidden_states, out)


def set_compiled(
    model: torch.nn.Module, compiled: bool, classes: Mapping[type[torch.nn.Module], type[CompiledLayer]]
) -> None:
    """Turn the layers of a model into ours, or back.

    Args:
        classes: transformers' decoder layer -> ours.

    Raises:
        ValueError: it has none that can be compiled.
    """
    changed: dict[Any, Any] = dict(classes) if compiled else {ours: theirs for theirs, ours in classes.items()}
    layers = [module for module in model.modules() if isinstance(module, tuple(classes))]
    if compiled and not layers:
        raise ValueError(
            f"compile_layers=True: {type(model).__name__} has no layer that can be compiled in parts. Valid: False, or a model "
            f"with one of {', '.join(sorted(layer.__name__ for layer in classes))}"
        )
    for layer in layers:
        layer.__class__ = changed.get(type(layer), type(layer))


@functools.cache
def _compiled(part: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(part, backend=backend, dynamic=True)


def _into_attention(layer: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return layer.self_attn.project(layer.input_layernorm(hidden), cos, sin)


def _out_of_attention(layer: Any, hidden: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    residual = hidden + layer.self_attn.o_proj(out)
    return residual, layer.post_attention_layernorm(residual)


def _to_the_end(layer: Any, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    residual, normed = _out_of_attention(layer, hidden, out)
    return residual + layer.mlp(normed)
