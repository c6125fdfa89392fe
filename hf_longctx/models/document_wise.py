"""Layers that carry a state from row to row by other means than attention, run document by document.

A Mamba, a gated delta rule, a short convolution, a token shift: each computes a row from the rows before it, whichever document
they belong to. Over a layout such a module runs once for each document of the shard, and its outputs are put together again:

    rows      | document 0        | document 1  | document 2     |
    calls     | module(rows of 0) | module(of 1)| module(of 2)   |

So each document has a state of its own, whatever the module is. Documents must be whole on a rank: the state of one that is split
would have to travel. Attention layers of the same model are not affected.

Which modules these are is found by running them (hf_longctx/certificate). Shapes: T tokens of this rank's shard.
"""

from typing import Any

import torch

from hf_longctx.attention.exchange import own_rank
from hf_longctx.layout import LayoutError
from hf_longctx.models.layout_mask import LayoutCall, LayoutMask, current_call


class DocumentWise:
    """A module's forward: over a layout, once for each document; without one, as ever."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before = module.__dict__.get("forward")
        """A forward that something else has installed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = current_call()
        if call is None:
            return self._forward(*args, **kwargs)
        lengths = whole_lengths(call, type(self._module).__name__)
        pieces = [_cut(value, lengths) for value in args]
        named = {name: _cut(value, lengths) for name, value in kwargs.items()}
        outputs = [
            self._forward(*(piece[i] for piece in pieces), **{name: piece[i] for name, piece in named.items()})
            for i in range(len(lengths))
        ]
        return _joined(outputs, lengths)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def whole_lengths(call: LayoutCall, what: str) -> list[int]:
    """Tokens of each document of this rank's shard, in order.

    Raises:
        LayoutError: one of them is not whole, or its rows are not in order.
    """
    layout = call.layout
    shard = layout.shard(own_rank(layout, call.exchange))
    for segment in shard:
        if segment.start != 0 or segment.stop != layout.doc_lengths[segment.doc]:
            raise LayoutError(
                f"{what} carries a state from row to row, and rows {segment.start} to {segment.stop} of document {segment.doc} "
                f"({layout.doc_lengths[segment.doc]} tokens) lie apart from the others: the state does not travel. Valid: "
                "documents that are whole on a rank, in order; a capacity that holds the longest document plans them so"
            )
    return [segment.stop - segment.start for segment in shard]


def _cut(value: Any, lengths: list[int]) -> list[Any]:
    """The part of an argument that belongs to each document: rows of a tensor [1, T, ...], parts of each tensor of a tuple, and
    anything else as it is."""
    if isinstance(value, torch.Tensor) and not isinstance(value, LayoutMask):
        if value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == sum(lengths):
            return list(value.split(lengths, dim=1))
    elif isinstance(value, tuple) and value and all(isinstance(part, torch.Tensor) for part in value):
        return list(zip(*(_cut(part, lengths) for part in value)))
    return [value] * len(lengths)


def _joined(outputs: list[Any], lengths: list[int]) -> Any:
    """One output of those of all documents."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if all(output.dim() >= 2 and output.shape[1] == length for output, length in zip(outputs, lengths)):
            return torch.cat(outputs, 1)
        return first  # what does not count rows: no model that was seen uses it
    if isinstance(first, tuple):
        return tuple(_joined(list(parts), lengths) for parts in zip(*outputs))
    return first
