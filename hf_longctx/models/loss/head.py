"""The forward of a patched causal language model: hidden states of this rank's shard, then its part of the loss.

    loss = sum over this rank's labels of CE / num_items_in_batch  +  coef * sum over documents of (T_d /
    num_tokens_in_batch) * aux(d)

Both counts are those of the whole optimizer step, over all ranks and micro-batches, so that the *sum* of the losses
of all ranks and micro-batches is the loss of the step, whatever the plan. Gradients are summed likewise. A rank
without a label returns zero with a graph, because its peers need its backward. Without a layout the model's own
forward runs.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from hf_longctx.attention.exchange import Exchange, own_rank
from hf_longctx.attention.on_device import on_device
from hf_longctx.layouts.layout import Layout
from hf_longctx.models.alone import outputs_alone
from hf_longctx.models.attention import carries_layouts, check_positions, refuse_other_implementation
from hf_longctx.models.families.mixtral import router_loss
from hf_longctx.models.layout_mask import LayoutCall, recomputing_alike, running
from hf_longctx.models.loss.balance import asks_for_balance, balance_settings
from hf_longctx.models.loss.cross_entropy import IGNORE, ObserveLogits, VocabularySlice, chunked_cross_entropy
from hf_longctx.models.loss.loss_by_length import LossByLength
from hf_longctx.models.loss.own_logits import base_of, logits_of, own_cross_entropy
from hf_longctx.models.loss.token_metrics import TokenMetrics

UNDERSTOOD = frozenset(
    {"collect", "earlier", "keep_attention", "output_attentions", "output_hidden_states", "return_dict"}
)
"""Keywords that a model takes over a layout beside those that `head_forward` names."""


class LayoutForward:
    """A module's forward: with a layout, `over_layout(module, ...)` runs; without one, the class's own forward.

    An object and not a bound function, which a copy or a pickle of the module would tie to the wrong one.
    """

    def __init__(self, module: torch.nn.Module, over_layout: Callable[..., Any]) -> None:
        self._module, self._over_layout = module, over_layout

    @property
    def __signature__(self) -> inspect.Signature:
        """Return that of the class's own forward: `generate` reads it."""
        return inspect.signature(functools.partial(type(self._module).forward, self._module))

    def __call__(self, *args: Any, layout: Layout | None = None, **kwargs: Any) -> Any:
        if layout is None:
            recomputing = recomputing_alike(self._module) if torch.is_grad_enabled() else contextlib.nullcontext()
            with running(None), recomputing:
                return type(self._module).forward(self._module, *args, **kwargs)
        return self._over_layout(self._module, *args, layout=layout, **kwargs)


class HeadForward:
    """The output head's forward: logits as ever; with labels, the sum of their cross-entropies, chunk by chunk.

    It is the module's own forward, so that whatever is attached to the module happens: FSDP2 gathers its weight in a hook.
    """

    def __init__(self, head: torch.nn.Linear) -> None:
        self._head = head
        self._before = head.__dict__.get("forward")
        """A forward that tensor parallelism has installed."""

    def __call__(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        chunk_tokens: int = 1024,
        observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
        label_rows: torch.Tensor | None = None,
        observe_logits: ObserveLogits | None = None,
        waits: bool = False,
    ) -> torch.Tensor:
        """hidden [B, T, H] -> [B, T, V]; with labels [1, T] (B is 1): a scalar, `observe` sees every loss in it, and
        `observe_logits` every chunk of logits. `label_rows` [n]: the rows with a label, where they are known; `waits`
        as cross_entropy.py has it."""
        head = self._head
        if not torch.is_autocast_enabled(hidden.device.type):
            # A Mamba's residual stream is wider than its weights, as its class knows.
            hidden = hidden.to(head.weight.dtype)
        if labels is not None:
            weight, part = _own_part(head.weight)
            bias, _ = _own_part(head.bias)
            return chunked_cross_entropy(
                *(hidden[0], weight, labels[0], bias, chunk_tokens, part, observe, label_rows, observe_logits, waits)
            )
        return type(head).forward(head, hidden) if self._before is None else self._before(hidden)


def install_head(head: torch.nn.Linear) -> None:
    """Replaces `head.forward` on this instance."""
    head.forward = HeadForward(head)  # type: ignore[assignment, method-assign]


def is_unpatched(head: torch.nn.Linear) -> bool:
    """Tell whether an output head has not got its forward here."""
    return not isinstance(head.__dict__.get("forward"), HeadForward)


def install_forward(module: torch.nn.Module, over_layout: Callable[..., Any]) -> None:
    """Replaces `module.forward` on this instance. The class, and with it what checkpoints name, stays as it is."""
    module.forward = LayoutForward(module, over_layout)


def head_forward(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    layout: Layout,
    exchange: Exchange | None = None,
    shift_labels: torch.Tensor | None = None,
    label_rows: torch.Tensor | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
    num_tokens_in_batch: int | None = None,
    output_router_logits: bool | None = None,
    loss_by_length: LossByLength | None = None,
    token_metrics: TokenMetrics | None = None,
    labels: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = None,
    ignore_index: int = IGNORE,
    **kwargs: Any,
) -> MoeCausalLMOutputWithPast:
    """A patched model's forward over a layout: input_ids [1, T] and shift_labels [1, T] of this rank's shard; see the
    module's docstring. Reads `model.longctx_loss_chunk_tokens`, the rows of logits that exist at once. `loss_by_length` takes
    in every label token's loss, `token_metrics` its logits. `label_rows` int64 [n]: the rows of shift_labels that count, from
    whoever knows them on the host (data/collator.py), so that the host need not wait for the device to find them. Keywords of
    UNDERSTOOD reach the base model, and through it the attention layers; any other is refused.
    """
    _refuse(layout, attention_mask, labels, past_key_values, ignore_index)
    _refuse_unknown(kwargs)
    rank = own_rank(layout, exchange)
    if tuple(input_ids.shape) != (1, layout.tokens(rank)):
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}, but rank {rank} holds {layout.tokens(rank)} tokens of this layout: "
            f"pass [1, {layout.tokens(rank)}], this rank's segments in memory order"
        )
    if position_ids is not None:
        check_positions(position_ids, layout, exchange)
    if output_router_logits is None:
        output_router_logits = asks_for_balance(model)
    outputs = base_outputs(model, input_ids, layout, exchange, output_router_logits=output_router_logits, **kwargs)
    hidden = outputs.last_hidden_state
    if shift_labels is None:
        return MoeCausalLMOutputWithPast(logits=logits_of(model, hidden), hidden_states=outputs.get("hidden_states"))
    if num_items_in_batch is None:
        raise ValueError(
            "shift_labels came without num_items_in_batch: the loss of a shard is normalised by the label tokens of the "
            "whole optimizer step, over all ranks and micro-batches; pass that count"
        )
    if isinstance(num_items_in_batch, int) and num_items_in_batch < 1:
        raise ValueError(
            f"num_items_in_batch={num_items_in_batch}: a step needs at least one label token, over all ranks"
        )
    if shift_labels.shape != input_ids.shape:
        raise ValueError(
            f"shift_labels has shape {tuple(shift_labels.shape)}, but input_ids has {tuple(input_ids.shape)}: one for each token"
        )
    observe = None if loss_by_length is None else loss_by_length.observer(layout, rank)
    observe_logits = None if token_metrics is None else token_metrics.observe
    cross_entropy = loss_of_hidden(
        model, hidden, shift_labels, label_rows=label_rows, observe=observe, observe_logits=observe_logits
    )
    loss = cross_entropy / num_items_in_batch
    aux_loss = None
    if output_router_logits:
        if num_tokens_in_batch is None:
            raise ValueError(
                "output_router_logits=True needs num_tokens_in_batch: the tokens of the whole optimizer step"
            )
        coefficient, experts = _router_settings(model, outputs)
        aux_loss = coefficient * router_loss(outputs.router_logits, experts, layout, exchange, num_tokens_in_batch)
        loss = loss + aux_loss
    return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, hidden_states=outputs.get("hidden_states"))


def loss_of_hidden(
    model: Any,
    hidden: torch.Tensor,
    shift_labels: torch.Tensor,
    *,
    label_rows: torch.Tensor | None,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None,
    observe_logits: ObserveLogits | None,
    waits: bool = False,
) -> torch.Tensor:
    """Sum the cross-entropies of a patched model's logits for hidden states [1, T, H] of its base model, a chunk of rows at a
    time: its head's logits, or its class's own where these are more.

    Raises:
        ValueError: the output head was changed after the model was patched.
    """
    rows = model.longctx_loss_chunk_tokens
    if getattr(model, "longctx_own_logits", False):
        return own_cross_entropy(model, hidden[0], shift_labels[0], rows, observe, label_rows, observe_logits)
    head = model.get_output_embeddings()
    observers = {"observe": observe, "observe_logits": observe_logits}
    cross_entropy: torch.Tensor = head(
        hidden, labels=shift_labels, chunk_tokens=rows, label_rows=label_rows, waits=waits, **observers
    )
    if cross_entropy.dim():
        raise ValueError(
            f"the output head, a {type(head).__name__}, was changed after patch_model, and adds logits to a sum of losses. "
            "Valid: no adapter on the output head (leave it out of target_modules)"
        )
    return cross_entropy


def _router_settings(model: Any, outputs: Any) -> tuple[float, int]:
    """The weight of the auxiliary loss, and experts of a token. Raises ValueError for a model that has no such loss."""
    coefficient, experts = balance_settings(model)
    if coefficient is None or experts is None or not getattr(outputs, "router_logits", None):
        raise ValueError(
            f"output_router_logits=True: {type(model).__name__} has no load-balancing loss as Mixtral's: router_aux_loss_coef "
            f"{coefficient}, num_experts_per_tok {experts}, router logits {bool(getattr(outputs, 'router_logits', None))}. "
            "Valid: output_router_logits=False"
        )
    return coefficient, experts


def base_outputs(
    model: Any,
    input_ids: torch.Tensor,
    layout: Layout,
    exchange: Exchange | None,
    *,
    output_router_logits: bool = False,
    **kwargs: Any,
) -> Any:
    """Run the base model (all but the output head) on input_ids [1, T] of this rank's shard."""
    rank = own_rank(layout, exchange)
    position_ids = on_device(layout.positions(rank), input_ids.device).unsqueeze(0)
    if carries_layouts(model):
        if output_router_logits:
            kwargs["output_router_logits"] = True
        if model.longctx_traits.alone:
            return outputs_alone(model, input_ids, layout, exchange, **kwargs)
        return _outputs_over_masks(model, input_ids, position_ids, layout, exchange, **kwargs)
    if hasattr(model.config, "output_router_logits"):
        kwargs["output_router_logits"] = output_router_logits
    return model.base_model(
        input_ids=input_ids,
        # A mask of four dimensions is taken as already prepared: transformers builds none from the positions of
        # packed documents. An attention layer that it reaches without the layout refuses it.
        attention_mask=torch.empty(0, 0, 0, 0, device=input_ids.device),
        position_ids=position_ids,
        layout_positions=position_ids,
        use_cache=False,
        layout=layout,
        exchange=exchange,
        **kwargs,
    )


def _outputs_over_masks(
    model: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    layout: Layout,
    exchange: Exchange | None,
    collect: Any = None,
    earlier: Any = None,
    **kwargs: Any,
) -> Any:
    """Run a model whose masks carry the layout. Raises ValueError if no attention layer has seen it."""
    call = LayoutCall(
        layout,
        exchange,
        kernel=model.longctx_kernel,
        keep_last_slice=model.longctx_keep_last_slice,
        collect=collect,
        earlier=earlier,
    )
    base, traits = base_of(model), model.longctx_traits
    if traits.in_masks:
        refuse_other_implementation(model)
    if traits.takes_positions:
        first = traits.first_position
        kwargs["position_ids"] = position_ids + first if first else position_ids
    with running(call), recomputing_alike(base):
        outputs = base(input_ids=input_ids, use_cache=False, **kwargs)
    if not call.seen and traits.splits_documents and traits.all_attend:
        raise ValueError(
            f"no attention layer of {type(model).__name__} has received the layout: its documents would not be kept apart. "
            "Valid: a model whose attention layers call transformers' attention interface with the mask that masking_utils makes"
        )
    return outputs


def _refuse(layout: Layout, attention_mask: Any, labels: Any, past_key_values: Any, ignore_index: int) -> None:
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask (shape {tuple(attention_mask.shape)}) came with a layout: documents in a layout are not padded. "
            "Remove the mask, or remove the layout to run an ordinary padded batch"
        )
    if past_key_values is not None and past_key_values.get_seq_length() > 0:
        raise ValueError(
            f"a cache of {past_key_values.get_seq_length()} tokens came with a layout: a layout holds whole documents and "
            "uses no cache. Remove past_key_values, or remove the layout to generate"
        )
    if labels is not None:
        raise ValueError(
            "labels came with a layout: a shard cannot shift them, because the next token may lie on another rank. Shift "
            "them per document before sharding (LengthAwareCollator does) and pass shift_labels [1, tokens of this rank]; "
            f"the layout holds {len(layout.doc_lengths)} documents on ranks {list(layout.ranks)}"
        )
    if ignore_index != IGNORE:
        raise ValueError(
            f"ignore_index={ignore_index} came with a layout: the chunked loss leaves out labels of {IGNORE} alone. Put {IGNORE} "
            "where no label counts"
        )


def _refuse_unknown(keywords: dict[str, Any]) -> None:
    for name, value in keywords.items():
        if value is None or name in UNDERSTOOD:
            continue
        shown = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"={str(value)[:40]}"
        raise ValueError(
            f"{name}{shown} came with a layout, over which models are certified for the ids of tokens alone: images and "
            f"sound move positions and masks, other keywords may be lost on the way. Valid: without {name}, or without a layout"
        )


def _own_part(parameter: Any) -> tuple[Any, VocabularySlice | None]:
    """The output head's parameter (None where it has none), or the rows that tensor parallelism has left to this rank."""
    if not isinstance(parameter, DTensor):
        return parameter, None
    mesh, [placement] = parameter.device_mesh, parameter.placements
    if not placement.is_shard():
        return parameter.full_tensor(), None
    first = min(mesh.get_local_rank() * -(-len(parameter) // mesh.size()), len(parameter))
    return parameter.to_local(), VocabularySlice(first, mesh.get_group())
