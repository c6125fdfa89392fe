"""Models that can be told of no layout: the plain model runs, on one whole document in a micro-batch.

A decoder of an encoder-decoder counts rows for positions, an XLM makes masks of its own, a byte model lays patches over its rows:
neither masks nor running modules document by document reaches them. Where a micro-batch is one document on one rank, there is
nothing to tell: rows are the document, in order. Ranks still take different documents, planned and balanced as ever.

    layout           {rank: (document 0 from its first token to its last,)}
    hidden states    the base model's, called with the tokens and nothing else
    loss             chunked, of the head's logits or of the class's own (loss/own_logits.py)

A class whose forward cannot be asked for the logits of given hidden states (ProphetNet predicts several tokens at once) is its
own base model: "hidden states" are then its logits, [T, V], all of which exist at once.

Shapes: T tokens of the document, H hidden size, V vocabulary. Nothing is sent.
"""

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from hf_longctx.attention.exchange import Exchange, own_rank
from hf_longctx.layouts.layout import Layout, LayoutError, Segment
from hf_longctx.models.loss.own_logits import base_of, is_own_base


def outputs_alone(
    model: Any, input_ids: torch.Tensor, layout: Layout, exchange: Exchange | None, **kwargs: Any
) -> BaseModelOutput:
    """Run the base model on input_ids [1, T] of one whole document, as it runs without a layout.

    Returns:
        The base model's output; its `last_hidden_state` is [1, T, H], or logits [1, T, V] of a model that is its own base.

    Raises:
        LayoutError: the layout holds several documents, spreads one over ranks, or has it in another order.
    """
    _refuse_all_but_one_document(type(model).__name__, layout, own_rank(layout, exchange))
    if not is_own_base(model):
        return base_of(model)(input_ids=input_ids, use_cache=False, **kwargs)  # type: ignore[no-any-return]
    logits = type(model).forward(model, input_ids=input_ids, use_cache=False, **kwargs).logits
    return BaseModelOutput(last_hidden_state=logits)


def _refuse_all_but_one_document(name: str, layout: Layout, rank: int) -> None:
    lengths = layout.doc_lengths
    [(document, length), *others] = lengths.items()
    if not others and layout.shards == {rank: (Segment(document, 0, length),)}:
        return
    raise LayoutError(
        f"{name} runs one whole document in a micro-batch, with the plain model (no layout reaches its attention), and this "
        f"layout has {len(lengths)} documents in {sum(map(len, layout.shards.values()))} pieces on {len(layout.ranks)} ranks. "
        f"Valid: Layout({{{rank}: (Segment({document}, 0, {length}),)}}), and another micro-batch for each other document, as "
        "Topology(documents='alone') plans them"
    )
