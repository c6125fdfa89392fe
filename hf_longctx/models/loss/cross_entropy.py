"""Cross-entropy from hidden states, in chunks of tokens: the logits [tokens, vocabulary] of a long document never
exist at once.

Each chunk's logits are turned into their own gradient at once, as fused kernels do (Liger-Kernel's
FusedLinearCrossEntropy): d loss / d logits = softmax - onehot needs nothing from later, so a chunk is computed once
and freed, and backward only scales, in place, the gradients of hidden states and of the weight that forward stored (unless it
`waits`). Rows without a label are never multiplied with the vocabulary.

Peak memory beyond the inputs: chunk * vocabulary logits in float32, and one gradient of the size of the weight.
Shapes: T tokens, H hidden size, V vocabulary. Sums run in float32 (float64 for float64 inputs).

Under tensor parallelism each rank has some rows of the weight, and multiplies with no others. Sent for each chunk of t
tokens: t maxima and 2t sums forward, and the gradient of t hidden states, which the ranks add up. Otherwise nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

IGNORE = -100
"""Label of a token whose prediction does not count."""


@dataclass(frozen=True)
class VocabularySlice:
    """Rows of the output head that a rank of a tensor-parallel group has."""

    first: int
    """token id of the first one"""
    group: dist.ProcessGroup
    """the ranks that have the others, and the same tokens"""


ObserveLogits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, VocabularySlice | None], None]
"""Takes the logits of some rows with a label ([t, V], or this rank's [t, v]), their labels (int64 [t]), log-sum-exp over the
whole vocabulary ([t, 1]), and which part of it the logits are."""


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    chunk_tokens: int = 1024,
    part: VocabularySlice | None = None,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    label_rows: torch.Tensor | None = None,
    observe_logits: ObserveLogits | None = None,
    waits: bool = False,
) -> torch.Tensor:
    """Sum over tokens of cross_entropy(hidden @ weight.T + bias, labels).

    Args:
        hidden: [T, H]
        weight: [V, H]
        labels: int64 [T], already shifted: labels[t] is the token that hidden[t] predicts, -100 where none counts.
        bias: [V]
        chunk_tokens: rows of logits that exist at once.
        part: where weight and bias are [v, H] and [v] of the vocabulary. All ranks of its group call this with the same
            hidden states and labels, and get the same sum and the whole gradient of hidden.
        observe: called with the rows of each chunk (int64 [t], those with a label) and their losses ([t]).
        label_rows: int64 [n], the rows with a label, where the caller knows them; see `rows_with_label`.
        observe_logits: called with each chunk's logits, which it leaves as they are, before these become gradients.
        waits: whether other forwards run before this one's backward, as in a pipeline. Each would keep a gradient of the size of
            the weight, so backward then computes it, from logits that it computes again: 8/6 of the products, the same bits.

    Returns:
        Scalar, float32 or float64. Zero, with zero gradients, where no label counts. Under autocast, matrix products
        run in the autocast dtype.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(
            *(hidden, weight, labels, bias, chunk_tokens, part, observe, label_rows, observe_logits, waits),
            torch.is_grad_enabled(),
        )


def rows_with_label(labels: torch.Tensor, known: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [n], ascending: the rows of labels [T] that count.

    Looking for them makes the host wait until the device has computed all before them. Whoever knew the labels on the host
    passes the rows, which are looked at on the device alone.

    Raises:
        RuntimeError: there are other rows with a label; on a GPU this comes late, as an assertion of the device.
    """
    counts = labels != IGNORE
    if known is None:
        return counts.nonzero().squeeze(1)
    torch._assert_async(
        (counts.sum() == len(known)) & counts[known].all(), "label_rows are not the rows whose shift_labels count"
    )
    return known


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        labels,
        bias,
        chunk_tokens,
        part,
        observe,
        label_rows,
        observe_logits,
        waits,
        needs_gradients,
    ):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight, _, needs_bias = [needs_gradients and needed for needed in ctx.needs_input_grad[:4]]
        ctx.waits = waits and (needs_weight or needs_bias)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        of_head = _HeadGradients.zeros(weight, bias, needs_weight and not waits, needs_bias and not waits, dtype)
        head_weight, head_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        counted = rows_with_label(labels, label_rows)
        normalizers = [total.new_empty((0, 1))]
        # Nothing adds nothing, and torch 2.11 cannot split fake tensors without rows.
        for rows in counted.split(chunk_tokens) if len(counted) else ():
            h = hidden[rows]
            target = labels[rows].unsqueeze(1)
            logits = torch.nn.functional.linear(h, head_weight, head_bias).to(dtype)
            if part is None:
                log_normalizer, of_target, here = logits.logsumexp(-1, keepdim=True), logits.gather(1, target), None
            else:
                target, here = _own_rows(target, part, len(weight))
                log_normalizer, of_target = _over_vocabulary(logits, target, here, part)
            losses = log_normalizer - of_target
            total += losses.sum()
            if observe is not None:
                observe(rows, losses.squeeze(1))
            if observe_logits is not None:
                observe_logits(logits, labels[rows], log_normalizer, part)
            if ctx.waits:
                normalizers.append(log_normalizer)
            if grad_hidden is None and not of_head.needed:
                continue
            grad_logits = _gradient_of_logits(logits, log_normalizer, target, here)
            rounded = grad_logits.to(h.dtype)
            of_head.add_(grad_logits, rounded, h)
            if grad_hidden is not None:
                of_rows = rounded @ head_weight
                if part is not None:
                    dist.all_reduce(of_rows, group=part.group)
                grad_hidden[rows] = of_rows
        ctx.gradients = (grad_hidden, of_head)
        if ctx.waits:
            ctx.save_for_backward(hidden, labels, counted, torch.cat(normalizers))
            # Not saved, so that no hook moves the head's weight elsewhere.
            ctx.head = (weight.detach(), None if bias is None else bias.detach(), chunk_tokens, part)
            ctx.needed = (needs_weight, needs_bias)
        return total

    @staticmethod
    def backward(ctx, grad_total):
        grad_hidden, of_head = ctx.gradients
        ctx.gradients = None
        if ctx.waits:
            with torch.autocast(grad_total.device.type, enabled=False):
                of_head = _gradients_again(*ctx.saved_tensors, *ctx.head, *ctx.needed)
        of_hidden = None if grad_hidden is None else grad_hidden.mul_(grad_total)
        return of_hidden, of_head.weight_times(grad_total), None, of_head.bias_times(grad_total), *(None,) * 7


@dataclass
class _HeadGradients:
    """Sums over rows of the gradients of an output head, in float32 or float64; None: not needed."""

    weight: torch.Tensor | None
    """[V, H]"""
    bias: torch.Tensor | None
    """[V]"""
    dtypes: tuple[torch.dtype, torch.dtype]
    """of the weight and the bias"""

    @classmethod
    def zeros(
        cls, weight: torch.Tensor, bias: torch.Tensor | None, needs_weight: bool, needs_bias: bool, dtype: torch.dtype
    ) -> "_HeadGradients":
        return cls(
            torch.zeros(weight.shape, dtype=dtype, device=weight.device) if needs_weight else None,
            torch.zeros(bias.shape, dtype=dtype, device=bias.device) if needs_bias and bias is not None else None,
            (weight.dtype, weight.dtype if bias is None else bias.dtype),
        )

    @property
    def needed(self) -> bool:
        return self.weight is not None or self.bias is not None

    def add_(self, grad_logits: torch.Tensor, rounded: torch.Tensor, h: torch.Tensor) -> None:
        """Add what rows with hidden states h [t, H] and gradients of their logits [t, V], also rounded to h's dtype, give."""
        if self.bias is not None:
            self.bias += grad_logits.sum(0)
        if self.weight is not None:
            half = h.dtype == torch.float16
            self.weight += _product_in_float32(grad_logits.t(), h) if half else rounded.t() @ h

    def weight_times(self, factor: torch.Tensor) -> torch.Tensor | None:
        """Scale the weight's in place; return it in the weight's dtype."""
        return None if self.weight is None else self.weight.mul_(factor).to(self.dtypes[0])

    def bias_times(self, factor: torch.Tensor) -> torch.Tensor | None:
        """Scale the bias's in place; return it in the bias's dtype."""
        return None if self.bias is None else self.bias.mul_(factor).to(self.dtypes[1])


def _gradient_of_logits(
    logits: torch.Tensor, log_normalizer: torch.Tensor, target: torch.Tensor, here: torch.Tensor | None
) -> torch.Tensor:
    """Turn logits [t, V] into the gradient of their losses, in place."""
    gradient = logits.sub_(log_normalizer).exp_()
    minus_one = torch.full_like(target, -1, dtype=logits.dtype)
    if logits.shape[1]:
        gradient.scatter_add_(1, target, minus_one if here is None else minus_one * here)
    return gradient


def _gradients_again(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    counted: torch.Tensor,
    normalizers: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    chunk_tokens: int,
    part: VocabularySlice | None,
    needs_weight: bool,
    needs_bias: bool,
) -> _HeadGradients:
    """Sum the gradients of the head from logits that are computed again; nothing is sent."""
    total = _HeadGradients.zeros(weight, bias, needs_weight, needs_bias, normalizers.dtype)
    head_weight, head_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    for at in range(0, len(counted), chunk_tokens):
        rows = counted[at : at + chunk_tokens]
        h, target, here = hidden[rows], labels[rows].unsqueeze(1), None
        if part is not None:
            target, here = _own_rows(target, part, len(weight))
        logits = torch.nn.functional.linear(h, head_weight, head_bias).to(normalizers.dtype)
        grad_logits = _gradient_of_logits(logits, normalizers[at : at + chunk_tokens], target, here)
        total.add_(grad_logits, grad_logits.to(h.dtype), h)
    return total


def _product_in_float32(grad_logits: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """grad_logits [V, t] times h [t, H]. In float16, a sum over thousands of rows with one label overflows, before the scaler's
    factor is divided out."""
    if h.is_cuda:
        return torch.mm(grad_logits.to(h.dtype), h, out_dtype=torch.float32)
    return grad_logits @ h.float()


def _own_rows(target: torch.Tensor, part: VocabularySlice, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels [T, 1] as rows of this rank's `count` (any row where it is another rank's), and whether they are its own."""
    row = target - part.first
    return row.clamp(0, max(count - 1, 0)), (row >= 0) & (row < count)


def _over_vocabulary(
    logits: torch.Tensor, row: torch.Tensor, here: torch.Tensor, part: VocabularySlice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp and the label's logit, both [T, 1] over all ranks' rows, from this rank's logits [T, v]."""
    own = logits.logsumexp(-1, keepdim=True)
    largest = own.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=part.group)
    of_target = logits.gather(1, row).masked_fill(~here, 0) if logits.shape[1] else torch.zeros_like(own)
    sums = torch.stack([(own - largest).exp(), of_target])
    dist.all_reduce(sums, group=part.group)
    return largest + sums[0].log(), sums[1]
