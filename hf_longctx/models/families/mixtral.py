"""Mixtral over layouts: its attention class, and the load-balancing loss defined per document.

The router's auxiliary loss of one document (transformers' load_balancing_loss_func, Switch Transformer equations 4 to
6), with L layers, E experts, T_d tokens:

    aux(d) = E * sum_e  (assignments of d to e) / (L * T_d)  *  (sum of router probabilities of d for e) / (L * T_d)

It is a product of two means, so that averaging it over the shards of a split document would be wrong. Once the
integer assignment counts of the whole document are known it is *linear* in the probabilities: each rank adds its own
tokens' part, and only the counts [documents, E] are exchanged, once a micro-batch, for split documents only. Weighted
by tokens, the sum over documents does not depend on the plan. Balancing each document alone is stricter than
balancing a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.models.mixtral import modeling_mixtral

from hf_longctx.attention.exchange import Exchange, own_rank, sum_over_holders
from hf_longctx.attention.on_device import on_device
from hf_longctx.layouts.layout import Layout
from hf_longctx.models.compiled_layers import CompiledLayer
from hf_longctx.models.families.family import Family
from hf_longctx.models.rope import WindowAttention


class LongContextMixtralAttention(WindowAttention, modeling_mixtral.MixtralAttention):  # type: ignore[misc]
    """MixtralAttention that runs over a layout when it is given one."""


class MixtralDecoderLayer(CompiledLayer, modeling_mixtral.MixtralDecoderLayer):  # type: ignore[misc]
    """MixtralDecoderLayer that is compiled in parts, but for its experts."""

    longctx_chooses_by_data = True


FAMILY = Family(
    attention=modeling_mixtral.MixtralAttention,
    layout_attention=LongContextMixtralAttention,
    decoder_layer=modeling_mixtral.MixtralDecoderLayer,
    compiled_layer=MixtralDecoderLayer,
    cut_model=modeling_mixtral.MixtralModel,
    liger_norm=modeling_mixtral.MixtralRMSNorm,
)


def router_loss(
    router_logits: tuple[torch.Tensor, ...],
    experts_per_token: int,
    layout: Layout,
    exchange: Exchange | None,
    tokens_in_step: int,
) -> torch.Tensor:
    """Compute this rank's part of the sum over documents of (T_d / tokens_in_step) * aux(d).

    Args:
        router_logits: one [T, E] per layer, for this rank's T tokens in memory order.
        experts_per_token: top-k of the router.
        tokens_in_step: tokens of the optimizer step, over all ranks and micro-batches.

    Returns:
        Scalar, float32 or float64. Summed over the ranks of the layout it is the loss of its documents.
    """
    sums = router_sums(router_logits, experts_per_token, layout, own_rank(layout, exchange))
    sum_over_holders(dict(zip(sums.documents, sums.assignments)), layout, exchange)
    lengths = [layout.doc_lengths[doc] for doc in sums.documents]
    return balance_loss(sums.assignments, sums.probabilities, lengths, len(router_logits), tokens_in_step)


@dataclass(frozen=True)
class RouterSums:
    """Over some layers, of this rank's tokens of each of its D documents."""

    documents: list[int]
    """[D], ascending"""
    assignments: torch.Tensor
    """int64 [D, E]"""
    probabilities: torch.Tensor
    """float32 or float64 [D, E], with a graph"""


def router_sums(router_logits: Sequence[torch.Tensor], experts_per_token: int, layout: Layout, rank: int) -> RouterSums:
    """router_logits: one [T, E] per layer, for this rank's T tokens in memory order."""
    documents, row_on_host = np.unique(layout.documents(rank), return_inverse=True)
    row = on_device(row_on_host, router_logits[0].device)
    experts = router_logits[0].shape[-1]
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    probabilities = torch.zeros(len(documents), experts, dtype=dtype, device=row.device)
    assignments = torch.zeros(len(documents), experts, dtype=torch.int64, device=row.device)
    for logits in router_logits:
        layer = logits.to(dtype).softmax(-1)
        # index_add would be atomic on CUDA, and its bits would differ from run to run; this sorts.
        probabilities = probabilities.index_put((row,), layer, accumulate=True)
        chosen = layer.detach().topk(experts_per_token, dim=-1).indices
        assignments.index_put_((row.unsqueeze(1).expand_as(chosen), chosen), torch.ones_like(chosen), accumulate=True)
    return RouterSums(documents.tolist(), assignments, probabilities)


def balance_loss(
    assignments: torch.Tensor, probabilities: torch.Tensor, lengths: list[int], layers: int, tokens_in_step: int
) -> torch.Tensor:
    """Linear in the probabilities: those of some tokens and layers give their part of the documents' loss.

    Args:
        assignments: int64 [D, E], of all tokens of each document in all layers.
        probabilities: [D, E], sums over the tokens and layers whose part is wanted.
        lengths: [D], tokens of each document.
        layers: of the model.
        tokens_in_step: tokens of the optimizer step, over all ranks and micro-batches.
    """
    tokens = on_device(torch.tensor(lengths, dtype=probabilities.dtype), probabilities.device)
    per_document = assignments.shape[-1] * (assignments * probabilities).sum(-1) / (layers * tokens) ** 2
    return (per_document * tokens / tokens_in_step).sum()
