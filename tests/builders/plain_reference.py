"""The loss that every plan must equal: one process, plain transformers, each document alone with full attention.

    L = sum over documents of CE(d) / label tokens  +  coef * sum over documents of (T_d / tokens) * aux(d)

Nothing of hf_longctx is used. Both losses are written out from their definitions, or are transformers' own functions, which
turn float64 into float32 and are kept from it here.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


class _DoublePrecision(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:  # also masks, which are averaged
            return args[0].double()
        if func is torch.nn.functional.softmax and args[0].dtype == torch.float64:
            kwargs = kwargs | {"dtype": None}
        if func is torch.zeros and kwargs.get("dtype") == torch.float32:  # sums over layers start from it
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def exact_scores(model: Any) -> AbstractContextManager[Any]:
    """BLOOM and MPT turn their scores into float32 before the softmax, whatever the model's dtype: within this context
    float64 scores stay as they are. Nothing changes for other models."""
    return _DoublePrecision() if model.config.model_type in {"bloom", "mpt"} else nullcontext()


def reference_loss(model: Any, documents: list[tuple[torch.Tensor, torch.Tensor]], stock: bool) -> torch.Tensor:
    """documents: (input_ids [T], labels [T], not shifted). With `stock`, transformers' own two loss functions are used,
    in float64."""
    label_tokens = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
    tokens = sum(len(ids) for ids, _ in documents)
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels in documents:
        routed = getattr(model.config, "output_router_logits", False)
        with nullcontext() if stock else exact_scores(model):
            output = model(input_ids=ids[None], use_cache=False)
        if len(ids) > 1:
            if stock:
                with _DoublePrecision():
                    loss = model.loss_function(
                        output.logits, labels[None], model.config.vocab_size, num_items_in_batch=label_tokens
                    )
                total = total + loss
            else:
                total = (
                    total
                    + torch.nn.functional.cross_entropy(output.logits[0, :-1], labels[1:], reduction="sum")
                    / label_tokens
                )
        if routed:
            experts, top_k = model.config.num_local_experts, model.config.num_experts_per_tok
            with _DoublePrecision() if stock else nullcontext():
                loss = (load_balancing_loss_func if stock else router_loss)(output.router_logits, experts, top_k)
            total = total + model.config.router_aux_loss_coef * len(ids) / tokens * loss
    return total


def router_loss(router_logits: tuple[torch.Tensor, ...], experts: int, top_k: int) -> torch.Tensor:
    """Switch Transformer, equations 4 to 6, over all layers of one document; router_logits: one [T, experts] a layer."""
    probabilities = torch.cat(router_logits).softmax(-1)
    chosen = probabilities.topk(top_k, dim=-1).indices
    share = torch.nn.functional.one_hot(chosen, experts).sum(1).to(probabilities.dtype).mean(0)
    return experts * (share * probabilities.mean(0)).sum()
