"""Modules that see more than rows through attention over a layout, run document by document.

A Mamba, a gated delta rule, a short convolution, a token shift: each computes a row from the rows before it, whichever document
they belong to. Positions by the number of a row, and attention code of a model's own, do likewise. Over a layout such a module
runs once for each document of the shard, and its outputs are put together again:

    rows      | document 0        | document 1  | document 2     |
    calls     | module(rows of 0) | module(of 1)| module(of 2)   |

So each document has a state of its own, whatever the module is. Documents must be whole on a rank: the state of one that is split
would have to travel. Attention layers of the same model are not affected.

Which modules these are is found by running them (hf_longctx/certificate). Shapes: T tokens of this rank's shard.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_longctx.attention.exchange import own_rank
from hf_longctx.layouts.layout import Layout, LayoutError, Segment
from hf_longctx.models.layout_mask import LayoutCall, LayoutMask, current_call, is_call_known, running


class DocumentWise:
    """A module's forward: over a layout, once for each document; without one, as ever."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before = module.__dict__.get("forward")
        """A forward that something else has installed."""
        self._has_run_over_layouts = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = current_call()
        if call is not None:
            self._has_run_over_layouts = True
        elif self._has_run_over_layouts and _is_in_backward() and not is_call_known():
            # Which of its forwards this one repeats cannot be told: perhaps one without a layout, which needs none.
            raise LayoutError(
                f"{type(self._module).__name__} is computed again in backward without its layout: something else than "
                "transformers checkpoints this layer, and its documents would not be kept apart. Valid: "
                "model.gradient_checkpointing_enable(), or gradient_checkpointing=True of the trainer"
            )
        if call is None:
            return self._forward(*args, **kwargs)
        documents = whole_documents(call, type(self._module).__name__)
        lengths = [len(segment) for segment in documents]
        pieces = [_cut(value, documents) for value in args]
        named = {name: _cut(value, documents) for name, value in kwargs.items()}
        outputs = []
        for i, segment in enumerate(documents):
            with running(_call_of(call, segment)):  # modules inside see one document too
                outputs.append(
                    self._forward(*(piece[i] for piece in pieces), **{name: piece[i] for name, piece in named.items()})
                )
        return _joined(outputs, lengths, type(self._module).__name__)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, eq=False)
class Pieces:
    """Holds what a module gives for each document beside its rows, where shapes differ: of a short one, all keys are chosen, of
    longer ones as many as the model asks for. Another module that runs document by document takes its piece; whoever computes
    with the whole fails."""

    of_documents: tuple[torch.Tensor, ...]


def whole_documents(call: LayoutCall, what: str) -> Sequence[Segment]:
    """The documents of this rank's shard, in order.

    Raises:
        LayoutError: one of them is not whole, or its rows are not in order.
    """
    layout = call.layout
    shard = layout.shard(own_rank(layout, call.exchange))
    for segment in shard:
        if segment.start != 0 or segment.stop != layout.doc_lengths[segment.doc]:
            raise LayoutError(
                f"{what} runs on whole documents (it carries a state from row to row, or counts rows), and rows {segment.start} "
                f"to {segment.stop} of document {segment.doc} ({layout.doc_lengths[segment.doc]} tokens) lie apart. "
                "Valid: documents that are whole on a rank, in order; a capacity that holds the longest one plans them so"
            )
    return shard


def _cut(value: Any, documents: Sequence[Segment]) -> list[Any]:
    """The part of an argument that belongs to each document: rows of a tensor [1, T, ...], rows and columns of a mask
    [., ., T, T], a LayoutMask of the document alone, parts of each tensor of a tuple, and anything else as it is."""
    lengths = [len(segment) for segment in documents]
    if isinstance(value, Pieces):
        return list(value.of_documents)
    if isinstance(value, LayoutMask):
        return [_mask_of(value, segment) for segment in documents]
    if isinstance(value, torch.Tensor):
        rows = sum(lengths)
        if (
            value.dim() == 4 and value.shape[-2:] == (rows, rows) and not value.requires_grad
        ):  # a mask, or a bias of positions
            ends = itertools.accumulate(lengths)
            return [value[:, :, end - length : end, end - length : end] for end, length in zip(ends, lengths)]
        if value.dim() == 4 and value.shape[:3] == (1, 1, rows):  # positions, for all heads
            return list(value.split(lengths, dim=2))
        if value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == rows:
            return list(value.split(lengths, dim=1))
    elif isinstance(value, tuple) and value and all(isinstance(part, torch.Tensor) for part in value):
        return list(zip(*(_cut(part, documents) for part in value)))
    return [value] * len(lengths)


def _call_of(call: LayoutCall, segment: Segment) -> LayoutCall:
    """The call of one whole document, which exchanges nothing with other ranks."""
    return replace(
        call, layout=Layout({0: (Segment(segment.doc, 0, len(segment)),)}), exchange=None, keep_attention=None
    )


def _mask_of(mask: LayoutMask, segment: Segment) -> LayoutMask:
    """The mask of one whole document."""
    if mask.call.collect is not None:
        raise LayoutError(
            "the keys and values of a prompt cannot be collected from attention that runs document by document. Valid: generate "
            "from the prompt itself"
        )
    return LayoutMask.of(_call_of(mask.call, segment), mask.pattern, mask.device, mask.unusable)


def _joined(outputs: list[Any], lengths: list[int], what: str) -> Any:
    """Join the outputs of all documents: rows [1, T, ...] or [T, ...] one after another. Other outputs (attention weights, a
    state) cannot be joined by rows and become None."""
    first = outputs[0]
    if isinstance(first, tuple):
        rest = [_rows_of([output[at] for output in outputs], lengths) for at in range(1, len(first))]
        return (_joined([output[0] for output in outputs], lengths, what), *rest)
    if not isinstance(first, torch.Tensor):
        return first
    joined = _rows_of(outputs, lengths)
    if joined is None or isinstance(joined, Pieces):
        raise LayoutError(
            f"{what} gives tensors of {[tuple(output.shape) for output in outputs[:3]]} for documents of {lengths[:3]} tokens: "
            "these are no rows, and cannot be put together. Valid: one document in a micro-batch"
        )
    return joined


def _rows_of(outputs: list[Any], lengths: list[int]) -> Any:
    """Rows one after another, or Pieces where they differ in more than their number; what is the same for all documents (a
    parameter), as it is; None for anything else."""
    if all(output is outputs[0] for output in outputs):
        return outputs[0]
    for dim in (1, 0):
        if all(
            isinstance(output, torch.Tensor) and output.dim() > dim and output.shape[dim] == length
            for output, length in zip(outputs, lengths)
        ):
            alike = len({output.shape[:dim] + output.shape[dim + 1 :] for output in outputs}) == 1
            return torch.cat(outputs, dim) if alike else Pieces(tuple(outputs))
    return None
